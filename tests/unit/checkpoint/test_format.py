"""The file: what goes in comes out, and whatever is wrong with it is an error of one kind."""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import struct
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from every import every

from mpistrat import CheckpointError, DataError, StructureError
from mpistrat.checkpoint import format
from mpistrat.checkpoint.format import Entry

RNG = np.random.default_rng(3)
ARRAYS = {
    "a/w": RNG.normal(size=(3, 4)),
    "a/step": np.array(7),
    "b": np.arange(5, dtype=np.int8),
    "c": np.array([True, False]),
    "d": (RNG.normal(size=3) + 1j).astype(np.complex64),
    "e": np.zeros((0, 3), np.float16),
    "f": np.arange(4.0).astype(ml_dtypes.bfloat16),
    "g": np.array([1, np.nan, -0.0, np.inf], np.longdouble),
    "h": np.asfortranarray(RNG.normal(size=(2, 3))),
}

W2 = {"w": Entry("float64", (2,))}


def like(arrays):
    return {name: Entry.from_array(array) for name, array in arrays.items()}


def written(path, arrays=ARRAYS, counter=3):
    with path.open("w+b") as file:
        format.write_archive(file, arrays, counter)
    return path


def same(left, right):
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes()


def test_what_goes_in_comes_out(tmp_path):
    found = format.read_archive(written(tmp_path / "x.npz"), like(ARRAYS))
    assert found.counter == 3
    assert found.arrays.keys() == ARRAYS.keys() == found.entries.keys()
    for name, array in ARRAYS.items():
        same(found.arrays[name], array)
        assert str(found.entries[name]) == Entry.from_array(array).__str__()
    assert str(found.entries["a/w"]) == "float64[3,4]"


def test_numpy_reads_it(tmp_path):
    with np.load(written(tmp_path / "x.npz")) as found:
        for name, array in ARRAYS.items():
            stored = array.view(np.uint16) if name == "f" else array
            same(found[name], stored)


def test_equal_values_are_equal_files(tmp_path):
    one, two = written(tmp_path / "1"), written(tmp_path / "2")
    assert one.read_bytes() == two.read_bytes()


def test_what_is_not_wanted_or_otherwise_is_left_out(tmp_path):
    wanted = like(ARRAYS)
    wanted["b"] = Entry("int16", (5,))
    wanted["a/w"] = Entry("float64", (4, 3))
    del wanted["c"]
    wanted["new"] = Entry("float64", (1,))
    found = format.read_archive(written(tmp_path / "x.npz"), wanted)
    assert found.arrays.keys() == ARRAYS.keys() - {"b", "a/w", "c"}
    assert found.entries.keys() == ARRAYS.keys()


SMALL = {"w": np.arange(3.0), "n": np.array(2)}


def test_every_truncation_is_found(tmp_path):
    path = written(tmp_path / "x.npz", SMALL)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="damaged") as error:
            format.read_archive(path, like(SMALL))
        assert "unpack" not in str(error.value)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="it is too short, with 0 bytes"):
        format.read_archive(path)


def test_a_directory_that_is_shorter_than_a_row_is_found(tmp_path):
    path = written(tmp_path / "x.npz", SMALL)
    data = path.read_bytes().partition(b"PK\1\2")[0]
    end = struct.pack("<4s6xHLL2x", b"PK\5\6", 1, 4, len(data))
    path.write_bytes(data + b"PK\1\2" + end + bytes(16))
    with pytest.raises(CheckpointError, match="46 bytes should follow"):
        format.read_archive(path)


@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.nightly), pytest.param(9, id="one of each byte")]
)
def test_every_flipped_bit_is_found(step, tmp_path):
    path = written(tmp_path / "x.npz", SMALL)
    whole = path.read_bytes()
    for bit in range(0, len(whole) * 8, step):
        bad = bytearray(whole)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match="damaged"):
            format.read_archive(path, like(SMALL))
    path.write_bytes(whole)
    assert format.read_archive(path, like(SMALL)).counter == 3


@pytest.mark.parametrize("extra", [b"x", bytes(30)])
def test_bytes_that_follow_are_found(extra, tmp_path):
    path = written(tmp_path / "x.npz", SMALL)
    path.write_bytes(path.read_bytes() + extra)
    with pytest.raises(CheckpointError, match="damaged"):
        format.read_archive(path, like(SMALL))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_random_damage_is_found(tmp_path):
    path, rng = written(tmp_path / "x.npz", SMALL), np.random.default_rng(1)
    whole = path.read_bytes()
    for _ in range(100_000):
        bad = np.frombuffer(whole, np.uint8).copy()
        at = rng.integers(len(bad), size=rng.integers(1, 9))
        bad[at] = rng.integers(256, size=len(at))
        if bad.tobytes() == whole:
            continue
        path.write_bytes(bad.tobytes())
        with pytest.raises(CheckpointError, match="damaged"):
            format.read_archive(path, like(SMALL))


def npy(array, allow_pickle=False):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


def header(text):
    body = text.encode().ljust(118 - 1) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


def archive(path, members, manifest=None, compression=zipfile.ZIP_STORED):
    """What somebody has made who knows the format: nothing of it is damaged."""
    told = entry() if manifest is None else manifest
    with zipfile.ZipFile(path, "w", compression) as file:
        text = told if isinstance(told, str | bytes) else json.dumps(told)
        file.writestr("manifest.json", text)
        for name, data in members.items():
            file.writestr(name, data)
        file.comment = bytes(16)
    return sealed(path, file.infolist())


def sealed(path, infos):
    with path.open("r+b") as file:
        end = file.seek(-16, os.SEEK_END)
        seal = format._compute_seal(file, infos, end)
        file.seek(end)
        file.write(seal)
    return path


GOOD = {"w.npy": npy(np.arange(2.0))}


def entry(dtype="float64", shape=(2,), **more):
    return {
        "format": 1,
        "save_counter": 1,
        "arrays": {"w": {"dtype": dtype, "shape": shape}},
        **more,
    }


HUGE = 1 << 40
BAD = {
    "an object": ({"w.npy": npy(np.array([print, 1], object), True)}, None),
    "a header that is code": ({"w.npy": header("__import__('os').abort()")}, None),
    "Fortran order": (
        {"w.npy": header("{'descr': '<f8', 'fortran_order': True, 'shape': (2,), }") + bytes(16)},
        None,
    ),
    "fewer bytes": ({"w.npy": npy(np.arange(2.0))[:-1]}, None),
    "more bytes": ({"w.npy": npy(np.arange(2.0)) + b"x"}, None),
    "another dtype": ({"w.npy": npy(np.arange(2))}, None),
    "another shape": ({"w.npy": npy(np.ones((1, 2)))}, None),
    "a member too many": ({**GOOD, "x.npy": npy(np.ones(1))}, None),
    "a member too few": ({}, None),
    "a way out": ({**GOOD, "../x.npy": npy(np.ones(1))}, None),
    "no .npy": ({"w.npy": b"hello"}, None),
    "an empty member": ({"w.npy": b""}, None),
    "version 3": ({"w.npy": b"\x93NUMPY\x03\x00" + npy(np.arange(2.0))[8:]}, None),
    "no format": (GOOD, {"arrays": {}}),
    "a format that is true": (GOOD, entry(format=True)),
    "a list": (GOOD, []),
    "no JSON": (GOOD, "{"),
    "no text": (GOOD, b"\xff\xfe\xfd"),
    "a lone surrogate": (GOOD, '{"format": 1, "save_counter": 1, "arrays": {"\\ud800": 1}}'),
    "deep JSON": (GOOD, "[" * 1_000_000),
    "a long number": (GOOD, entry(save_counter=int("9" * 4000))),
    "a negative counter": (GOOD, entry(save_counter=-1)),
    "a counter that is not": (GOOD, entry(save_counter=1.5)),
    "a negative size": (GOOD, entry(shape=[-2])),
    "a shape that is none": (GOOD, entry(shape="2")),
    "a dtype that is none": (GOOD, entry(dtype=["<f8"])),
    "no arrays": (GOOD, {"format": 1, "save_counter": 1}),
    "arrays that are none": (GOOD, {"format": 1, "save_counter": 1, "arrays": [1]}),
}


@every("case", BAD)
def test_what_makes_no_sense_is_refused(case, tmp_path):
    path = archive(tmp_path / "x.npz", *BAD[case])
    with pytest.raises(CheckpointError, match=r"x\.npz is damaged, or not a checkpoint: "):
        format.read_archive(path, W2)


def test_what_nobody_asked_for_is_not_made(tmp_path):
    objects = {"w.npy": npy(np.array([print, 1], object), True)}, entry("object")
    found = format.read_archive(archive(tmp_path / "x.npz", *objects), W2)
    assert found.arrays == {}
    assert found.entries.keys() == {"w"}


def test_no_memory_is_reserved_for_what_the_file_does_not_have(tmp_path):
    huge = {"w.npy": header(f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({HUGE},), }}")}
    path = archive(tmp_path / "x.npz", huge, entry(shape=[HUGE]))
    for wanted in (None, {}, {"w": Entry("float64", (HUGE,))}):
        with pytest.raises(CheckpointError, match="more or fewer bytes"):
            format.read_archive(path, wanted)


def test_the_archive_of_these_tests_is_read_if_it_is_good(tmp_path):
    found = format.read_archive(archive(tmp_path / "x.npz", GOOD), W2)
    same(found.arrays["w"], np.arange(2.0))


def test_a_newer_format_is_named(tmp_path):
    path = archive(tmp_path / "x.npz", GOOD, entry(format=2))
    with pytest.raises(DataError, match="of format 2, and this version of mpistrat reads"):
        format.read_archive(path, {})


def test_compression_is_refused(tmp_path):
    path = archive(tmp_path / "x.npz", GOOD, None, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="is compressed"):
        format.read_archive(path, W2)


def test_one_name_twice_is_refused(tmp_path):
    path = archive(tmp_path / "x.npz", GOOD)
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("w.npy", npy(np.zeros(2)))
    with pytest.raises(CheckpointError, match="one name"):
        format.read_archive(path, W2)


def test_other_byte_orders_are_read(tmp_path):
    path = archive(tmp_path / "x.npz", {"w.npy": npy(np.arange(2.0).astype(">f8"))})
    same(format.read_archive(path, W2).arrays["w"], np.arange(2.0))


@pytest.mark.parametrize("times", [1, 3])
def test_a_parser_that_another_thread_disturbs_is_asked_again(times, tmp_path, monkeypatch):
    path, parse, disturbed = written(tmp_path / "x.npz"), ast.literal_eval, []

    def disturb(text):
        if len(disturbed) < times:
            disturbed.append(text)
            raise SystemError("AST constructor recursion depth mismatch (before=54, after=53)")
        return parse(text)

    monkeypatch.setattr(ast, "literal_eval", disturb)
    found = format.read_archive(path, like(ARRAYS)).arrays
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        same(found[name], array)
    assert len(disturbed) == times


def test_a_pipe_and_a_directory_are_no_checkpoints(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(CheckpointError, match="not a regular file"):
            format.read_archive(path, {})
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_an_error_of_the_disk_names_the_file(code, tmp_path, monkeypatch):
    def fails(*args):
        raise OSError(code, os.strerror(code))

    written(tmp_path / "x.npz")
    monkeypatch.setattr(format, "_read_array", fails)
    with pytest.raises(OSError, match=r"x\.npz") as caught:
        format.read_archive(tmp_path / "x.npz")
    assert caught.value.errno == code


def test_what_is_not_there_is_no_damage(tmp_path):
    with pytest.raises(FileNotFoundError):
        format.read_archive(tmp_path / "x.npz", {})


GIB = 1 << 30


def stretched(path, at):
    """Put 6 GiB of nothing into a file before its byte `at`; on the disk they take no room."""
    data = path.read_bytes()
    with path.open("wb") as file:
        file.write(data[:at])
        file.truncate(at + 6 * GIB)
        file.seek(0, os.SEEK_END)
        file.write(data[at:])
    return path


def sparse_member(path, manifest_shape):
    """An archive, well made except for its checksums, whose one array has 6 GiB of zeros."""
    told = json.dumps(entry(shape=manifest_shape)).encode()
    data = npy(np.zeros(0))
    size = len(data) + 6 * GIB
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as made:
        made.writestr("manifest.json", told)
        info = zipfile.ZipInfo("w.npy")
        info.file_size = info.compress_size = size
        info.header_offset, info.CRC = file.tell(), 0
        file.write(info.FileHeader(zip64=True) + data)
        file.truncate(file.tell() + 6 * GIB)
        made.start_dir = file.seek(0, os.SEEK_END)
        made.filelist.append(info)
        made._didModify = True
        made.comment = bytes(16)
    return sealed(path, made.infolist())


def directory_of(path, size):
    """Let the end of an archive claim a directory of so many bytes, and have them."""
    stretched(path, path.stat().st_size - 38)
    with path.open("r+b") as file:
        file.seek(-38, os.SEEK_END)
        end = bytearray(file.read())
        end[12:16] = size.to_bytes(4, "little")
        file.seek(-38, os.SEEK_END)
        file.write(end)
    return path


HUGE_FILES = {
    "zeros only": lambda path: stretched(path, path.stat().st_size),
    "before": lambda path: stretched(path, 0),
    "within the data": lambda path: stretched(path, path.stat().st_size // 2),
    "before the end": lambda path: stretched(path, path.stat().st_size - 38),
    "in the directory": lambda path: directory_of(path, (1 << 32) - 1),
    "an array of which the manifest says less": lambda path: sparse_member(path, [3]),
    "an array of which the manifest says as much": lambda path: sparse_member(path, [6 * GIB // 8]),
}


@pytest.mark.parametrize("case", HUGE_FILES)
def test_a_huge_file_that_does_not_fit_costs_neither_memory_nor_time(case, tmp_path, monkeypatch):
    path = HUGE_FILES[case](written(tmp_path / "x.npz", {"w": np.arange(3.0)}))
    assert path.stat().st_size > 6 * GIB
    read = []

    class Counted(io.BufferedReader):
        def read(self, size=-1):
            data = super().read(size)
            read.append(len(data))
            return data

    monkeypatch.setattr(os, "fdopen", lambda fd, mode: Counted(io.FileIO(fd, "rb")))

    def check(entries):
        if entries["w"].shape != (3,):
            raise StructureError("does not fit")

    with pytest.raises((CheckpointError, StructureError)):
        format.read_archive(path, {"w": Entry("float64", (3,))}, check)
    assert sum(read) < 1 << 20
