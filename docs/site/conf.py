"""The documentation site, made by Sphinx: the Markdown pages as they are, and the public names' docstrings.

docs/README.md lists the pages; its sections are the site's navigation.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import flyte_ddp  # noqa: E402
from docs.site.pages import listed_pages  # noqa: E402

project = "flyte-ddp-training"
author = "The flyte-ddp-training authors"
copyright = author
release = flyte_ddp.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.linkcode", "sphinx_copybutton"]
extensions += ["docs.site.pages", "docs.site.api", "docs.site.sources"]

root_doc = "README"
# All of docs, so that a page that is not listed is an error
include_patterns = ["docs/*.md", *(f"{page}.md" for page in listed_pages())]
# Folders that would take long to walk through
exclude_patterns = [".*", "**/.*", "build", "dist", "flyte_ddp", "tests"]
myst_heading_anchors = 4  # the links to headings are GitHub's
highlight_language = "none"  # of blocks that name none
copybutton_prompt_text = "$ "

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autoclass_content = "both"  # arguments are described by __init__
napoleon_custom_sections = [("Attributes", "params_style")]
maximum_signature_line_length = 120
python_use_unqualified_type_names = True

html_theme = "furo"  # whose fonts are the reader's own: a page asks no other host
html_title = f"{project} {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False
html_show_sphinx = False
