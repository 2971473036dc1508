"""Python source as HTML, a line at a time: keywords, strings, comments and numbers in spans."""

from __future__ import annotations

import io
import keyword
import tokenize

from markupsafe import Markup, escape

_CLASSES = {tokenize.COMMENT: "co", tokenize.STRING: "st", tokenize.NUMBER: "nu"}


def lines(source: str) -> list[Markup]:
    """Each line of a module that parses."""
    text = source.splitlines()
    spans: list[list[tuple[int, int, str]]] = [[] for _ in text]
    previous = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        css = _CLASSES.get(token.type, "")
        if token.type == tokenize.NAME:
            css = "kw" if keyword.iskeyword(token.string) else "de" if previous in ("def", "class") else ""
            previous = token.string
        if css:
            (first, begin), (last, end) = token.start, token.end
            for line in range(first, last + 1):
                left = begin if line == first else 0
                right = end if line == last else len(text[line - 1])
                spans[line - 1].append((left, right, css))
    return [_line(line, marks) for line, marks in zip(text, spans, strict=True)]


def _line(text: str, spans: list[tuple[int, int, str]]) -> Markup:
    parts, position = [], 0
    for begin, end, css in spans:
        parts.append(escape(text[position:begin]))
        parts.append(Markup('<span class="{}">{}</span>').format(css, text[begin:end]))
        position = end
    return Markup("").join([*parts, escape(text[position:])])
