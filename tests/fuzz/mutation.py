"""Valid documents, changed: cut, doubled, spliced, and with awkward pieces put in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@st.composite
def mutated(
    draw: Callable[..., int],
    documents: Sequence[str],
    pieces: Sequence[str],
    changes: int = 4,
) -> str:
    """A text near one of the documents."""
    text = documents[draw(st.integers(0, len(documents) - 1))]
    for _ in range(draw(st.integers(0, changes))):
        kind = draw(st.integers(0, 5))
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        if kind == 0:
            new = ""
        elif kind == 1:
            new = text[start:end] * 2
        elif kind == 2:
            other = documents[draw(st.integers(0, len(documents) - 1))]
            cut = draw(st.integers(0, len(other)))
            new = other[cut : cut + draw(st.integers(0, 30))]
        elif kind == 3:
            new = chr(draw(st.integers(0, 0x2FF)))
        else:
            new, end = pieces[draw(st.integers(0, len(pieces) - 1))], start
        text = text[:start] + new + text[end:]
    return text
