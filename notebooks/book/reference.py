"""What the reference of the book needs beyond autodoc: lists of all options and codecs, and links from short names.

Docstrings name things as people write them, `Options` or `hivenb.Options`, and signatures as they are defined,
``hivenb.options.options.Options``: both lead to where the reference describes them.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

from hivenb.compression import CODECS
from hivenb.options import FIELDS, Option

_GROUPS = {
    "rounds": "When and how peers meet",
    "overlap": "In the background",
    "memory": "Memory",
    "compression": "What travels",
}


class OptionList(SphinxDirective):
    """All options, with default, unit and meaning, as ``hivenb.options.FIELDS`` has them."""

    def run(self) -> list[nodes.Node]:
        """The nodes that stand in its place."""
        lines: list[str] = []
        for group, title in _GROUPS.items():
            lines += [f".. rubric:: {title}", ""]
            for name, field in FIELDS.items():
                if field.group == group:
                    lines += [f"``{name}``", *(f"    {line}" for line in described(field)), ""]
        unknown = {field.group for field in FIELDS.values()} - set(_GROUPS)
        if unknown:
            raise self.error(f"options of unknown groups: {', '.join(sorted(unknown))}")
        return parsed(self, lines)


class CodecList(SphinxDirective):
    """All codecs that have a name, as ``hivenb.compression.CODECS`` has them."""

    def run(self) -> list[nodes.Node]:
        """The nodes that stand in its place."""
        lines: list[str] = []
        for name, codec in CODECS.items():
            needs = f"; needs the package {codec.package}" if codec.package else ""
            facts = f"*{codec.label}*; {codec.bytes_per_parameter:g} bytes for each parameter{needs}"
            lines += [f"``{name}``", f"    {codec.help}", "", f"    {facts}", ""]
        return parsed(self, lines)


def parsed(directive: SphinxDirective, lines: list[str]) -> list[nodes.Node]:
    """The nodes of some lines of reStructuredText."""
    place = nodes.container()
    directive.state.nested_parse(StringList(lines, source=directive.name), 0, place)
    return place.children


def described(field: Option) -> list[str]:
    """What is known of an option, in lines of reStructuredText."""
    return [field.help.replace("*", r"\*"), "", f"*{field.label}*; {field.facts}"]


def without_options(app: Sphinx, what: str, name: str, found: Any, settings: Any, lines: list[str]) -> None:
    """Leaves the options out of their class's docstring: the page lists them by groups."""
    if name == "hivenb.Options":
        start = next(number for number, line in enumerate(lines) if line.startswith(":param "))
        end = next(number for number, line in enumerate(lines) if line.startswith(":raises "))
        del lines[start:end]


def find(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.Element) -> nodes.Element | None:
    """The place in the reference that a name means which is not that of an entry: the one entry of the same end."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    entries: dict[str, Any] = env.domaindata["py"]["objects"]
    if "." in target and not target.startswith("hivenb."):
        ends = [target]
    else:
        last_two = target.split(".")[-2:]
        ends = [".".join(last_two), last_two[-1]] if target.startswith("hivenb.") else [target]
    for end in ends:
        found = [name for name in entries if f".{name}".endswith(f".{end}") and not entries[name].aliased]
        if len(found) == 1:
            entry = entries[found[0]]
            return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, text, found[0])
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    app.add_directive("codecs-of-hivenb", CodecList)
    app.add_directive("options-of-hivenb", OptionList)
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", without_options)
    app.connect("missing-reference", find)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
