"""The stand-in for ``sys.exit``; `tests/faults/test_leaving.py` holds the codes of programs."""

from __future__ import annotations

import pickle
import threading

import pytest

from mpistrat.lockstep.exits import Exits, NotedExit


def raised(status):
    with pytest.raises(SystemExit) as found:
        Exits().exit(status)
    return found.value


@pytest.mark.parametrize("status", [None, 0, 3, "text", (1, 2)])
def test_it_is_a_system_exit_like_any_other(status):
    error, usual = raised(status), SystemExit(status)
    assert (error.code, error.args, str(error), repr(error)) == (
        *(usual.code, usual.args, str(usual), repr(usual)),
    )
    error.code = 7
    assert error.code == 7
    assert type(pickle.loads(pickle.dumps(error))) is SystemExit
    assert type(error) is NotedExit


def test_another_thread_raises_what_python_passes_over():
    kinds = []

    def work():
        try:
            Exits().exit(3)
        except SystemExit as error:
            kinds.append(type(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert kinds == [SystemExit]
