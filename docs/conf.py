"""How Sphinx builds these pages: ``python -m sphinx -W docs build/docs``.

The pages of the reference are written into ``reference/`` when a build begins, from the public
names of the package (`public_names`).
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import public_names

import mpistrat

project = "mpistrat"
author = "the mpistrat contributors"
version = release = mpistrat.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["programs"]
myst_heading_anchors = 3

default_role = "py:obj"  # `name` in a docstring is a name of the library, where there is one
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# tf.compat.v1 has classes of the same names; annotations mean these.
autodoc_type_aliases = {"Strategy": "mpistrat.Strategy"}
maximum_signature_line_length = 90
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"mpistrat {version}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]


def generate(app):
    """Write the pages that are made from the package."""
    public_names.name_classes()
    public_names.write(Path(app.srcdir, "reference"))


def let_names_break(app, pagename, templatename, context, doctree):
    """Let browsers break long names between words: else tables are wider than the page."""
    if "body" in context:
        context["body"] = re.sub(
            r'(?<=<span class="pre">)[\w.]{16,}(?=</span>)',
            lambda name: re.sub(r"(?<=[._])(?=\w)|(?<=[a-z])(?=[A-Z])", "<wbr>", name[0]),
            context["body"],
        )


def setup(app):
    """Let Sphinx make those pages, and show the sections that docstrings have here."""
    app.connect("builder-inited", generate)
    app.connect("html-page-context", let_names_break)
    # Before napoleon, which is connected at 500 and knows Args, Returns and Raises only.
    app.connect("autodoc-process-docstring", public_names.sections, priority=400)
