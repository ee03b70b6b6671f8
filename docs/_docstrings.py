"""Docstrings as they are written here, put into the words that griffe reads.

"Example:" is code to it only as "Examples:"; names that go on on a second line are lost; what is returned is no list of
types; and errors may be said in words ("as ``ring_conv``").
"""

import inspect
import re

import griffe

_SECTION = re.compile(r"(?m)^(Args|Attributes|Returns|Raises|Example):\n((?:(?:[ ]+.*)?(?:\n|\Z))+)")


def reworded(text: str) -> str:
    """The docstring that griffe is given."""
    return _SECTION.sub(lambda found: _section(found[1], found[2]), text)


def _section(name: str, body: str) -> str:
    if name == "Example":
        return f"Examples:\n{body}"
    words = inspect.cleandoc(body)
    if name == "Returns":
        return f"**Returns:**\n\n{words}\n\n"
    if name == "Raises" and not re.match(r"[\w., ]+: ", words):
        return f"**Raises:**\n\n{words}\n\n"
    # A line of names that ends in a comma goes on: on the next one.
    body = re.sub(r"(?m)^(  (?:\*{0,2}\w+, )*\*{0,2}\w+,)\n +", r"\1 ", body)
    if name == "Args":
        return f"{name}:\n{body}"
    # Of attributes, "x, y: both" would be x, of type y.
    several = r"(?m)^  (?:\*{0,2}\w+, )+\*{0,2}\w+:"
    body = re.sub(several, lambda found: found[0].replace(", ", ",\xa0"), body)
    return f"{name}:\n{body}"


class Examples(griffe.Extension):
    """Rewords docstrings before they are parsed, and leaves out types that say nothing."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Of every object that is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = reworded(inspect.cleandoc(obj.docstring.value))
        if isinstance(obj, griffe.Function):
            for parameter in obj.parameters:
                if str(parameter.annotation) == "Any":
                    parameter.annotation = None
