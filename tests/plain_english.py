"""Finds phrases that a reader has to decode, in docstrings, comments and Markdown.

    python tests/plain_english.py scaledtensor docs README.md   # lists the hits, and counts them
    python tests/plain_english.py --counts scaledtensor         # counts only, most hits first

`INTENDED` lists the phrases that stay, with a reason each.

The rules of the language itself are in CONTRIBUTING.md. This program checks only the part of them
that a pattern finds reliably. Code in backquotes, doctests and code blocks are not searched.
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Riddle(NamedTuple):
    pattern: str
    why: str
    instead: str


_VERBS = "is|are|was|were|has|had|have|holds?|reads?|makes?|gives?|gets?|takes?|knows?|sees?|keeps?"
#: Found anywhere in a sentence, in capitals or not.
RIDDLES = {
    "that of": Riddle(r"\bthat of\b(?! (?:the )?\d)", "a pronoun for an unnamed noun", "the noun"),
    "those of": Riddle(r"\bthose of\b", "a pronoun for an unnamed noun", "the noun"),
    "of what": Riddle(r"\bof what\b", "a clause for a noun", "the name of the thing"),
    "of which": Riddle(
        r"(?<!\bnone )(?<!\ball )(?<!\bone )(?<!\bboth )(?<!\bsome )\bof which\b",
        "the reader must turn the clause round",
        "a second sentence, or `whose`",
    ),
    "none where": Riddle(r"\bnone where\b", "an incomplete condition", "`None if x has no y`"),
    "where there is none": Riddle(
        r"\bwhere (?:it|they|there) (?:is|are) (?:not|none|no)(?=[.,;:)]|$)",
        "an incomplete condition",
        "`if there is no x`, or `otherwise`",
    ),
    "what is not": Riddle(
        r"\bwhat is not\b", "a thing without a name", "`all others`, or its name"
    ),
    "what comes": Riddle(
        r"\bwhat (?:comes|goes|stays|follows|remains|calls)\b",
        "a thing without a name",
        "its name: the caller, the result, the next operator",
    ),
    "what it is": Riddle(
        r"\bwhat (?:it|they|this|that) (?:is|are|was|were|has|had|have)\b",
        "a thing without a name",
        "its name: the value, the elements, the state",
    ),
    "what the x is": Riddle(
        rf"\bwhat (?:a|an|the|each|every|its|one|this) [`\w.]+ (?:{_VERBS})\b"
        r"(?! (?:not )?(?:been|to)\b)",
        "a clause for a noun",
        "its name: the result, the operand, the state of x",
    ),
    "who comes": Riddle(r"\bwho comes\b", "a figure of speech", "`users of x`"),
    "for the price of": Riddle(r"\bfor the price of\b", "a figure of speech", "`costs x`"),
    "goes on with": Riddle(r"\bgo(?:es)? on with\b", "a figure of speech", "`continues with`"),
    "door": Riddle(r"\bdoors?\b", "a figure of speech", "`entry point`, or `function`"),
    "one's own": Riddle(r"\bone's own\b", "bookish", "`your own`, or `custom`"),
    "as of": Riddle(
        r"\bas of (?:`|torch|for|in)", "a date", "`as in `torch.x``, or `see `torch.x``"
    ),
    "are no such": Riddle(r"\b(?:is|are) no such\b", "the reader must look back", "the noun"),
    "it is so": Riddle(r"\bit is so\b", "the reader must look back", "the predicate"),
    "but for": Riddle(r"\bbut for\b", "bookish", "`except for`"),
    "anew": Riddle(r"\banew\b", "bookish", "`again`"),
    "is said": Riddle(r"\b(?:is|are) said\b", "a passive without a subject", "`a warning says`"),
}

#: Another clause with "what" instead of a noun. It is plain English after verbs of saying.
WHAT = Riddle(
    r"(?<!\w)(?!(?:says?|said|saying|shows?|showing|knows?|decides?|out|sees?|prints?|asks?|tells?|lists?|matter"
    r"|describes?|explains?|measures?|about|determines?|wonders?|learns?|chooses?) what)"
    r"\w+[,;:]? \(?what \(?(?!to\b|if\b)[a-z`]",
    "a clause for a noun",
    "its name, or `the values that`, `the operand that`, `anything that`",
)
#: The first words of a sentence without a main clause -> (the reason, the replacement).
STARTS = {
    "Of": ("a sentence without a subject", "start with the noun: `Format of weights.`"),
    "Whose": ("a sentence without a main clause", "`Its scale is ...`"),
    "Where": ("a condition without a main clause", "`If x, y.`, or a noun"),
    "Which": ("a sentence without a main clause", "`The index of ...`, `This ...`"),
    "As": ("a comparison without a verb", "`Same as `relu`.`, `Works like ...`"),
    "It, or": ("a pronoun stands for the subject", "`Rebuilds the tensor, or its shard.`"),
    "Itself, or": ("a pronoun stands for the subject", "`Returns x, or ...`"),
    "What": ("a clause stands for the subject", "start with the thing itself"),
}
#: These may begin a sentence without a comma, so they count only if no verb is near.
ADVERBS = (
    "By",
    "In",
    "On",
    "At",
    "With",
    "Without",
    "From",
    "For",
    "To",
    "Under",
    "Over",
    "Within",
)
ADVERB = ("an adverb without a verb", "start with the noun or the verb: `Runs in float32.`")
#: A comma and one of these begin no main clause.
SUBORDINATE = re.compile(
    r"(?:where|which|whose|who|of|or|and|as|with|in|for|by|from|not|but|at|to|on|if|when|unless"
    r"|that|without|under|over|within|than|since|because|while)\b",
    re.IGNORECASE,
)
VERB = re.compile(
    r"\b(?:is|are|was|were|has|does|been?|have|had|do|did|can|could|will|would|may|might|must|should|need"
    r"|come|run|make|take|give|get|keep|stay|hold|read|go|see|use|cost|work)\b"
)
#: Joins the words of inline code, so that no pattern of several words is found in it.
JOINT = "\x01"
SENTENCE = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*`]*[A-Z0-9])")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|Eq|eq|Fig|Sec|sec|al|resp)\.\s")
ARGUMENT = re.compile(r"^\s*\*{0,2}\w+(?:, \*{0,2}\w+)*(?: \([^)]*\))?:\s+")
BULLET = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
HEADING = re.compile(r"^\s{0,3}#{1,6} ")
FENCE = re.compile(r"^\s*(?:>\s*)?(?:```|~~~)")


class Hit(NamedTuple):
    path: str
    line: int
    pattern: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.pattern}] {self.text}"


#: (path, words of the sentence) -> why it stays.
INTENDED: dict[tuple[str, str], str] = {
    ("CONTRIBUTING.md", 'instead of "that of"'): "names phrases to avoid",
}


# --- the texts of a file ---


def blocks(path: Path) -> Iterator[tuple[int, str]]:
    """(first line, text) of each docstring, comment or Markdown page of a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, _without_code_blocks(source)
    elif path.suffix == ".ipynb":
        for i, cell in enumerate(json.loads(source)["cells"]):
            if cell["cell_type"] == "markdown":  # the cell's number stands for its line
                yield i, _without_code_blocks("".join(cell["source"]))
    elif path.suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            # Every string that stands alone: docstrings, and the texts below fields.
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield node.lineno, node.value.value
        yield from _comments(source)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments, with neighbouring lines joined."""
    first, last, column, lines = 0, -1, -1, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, at = token.start
        text = token.string.lstrip("#:!").strip()
        if text.startswith("---"):  # the heading of a part of the file
            continue
        if row == last + 1 and at == column:
            lines.append(text)
        else:
            if lines:
                yield first, "\n".join(lines)
            first, column, lines = row, at, [text]
        last = row
    if lines:
        yield first, "\n".join(lines)


def _without_code_blocks(text: str) -> str:
    lines, inside = [], False
    for line in text.splitlines():
        fence = bool(FENCE.match(line))
        lines.append("" if fence or inside or line.startswith("    ") else line)
        inside ^= fence
    # A page's indented lines are code, except those that continue a list.
    return re.sub(r"<!--.*?-->", lambda m: "\n" * m[0].count("\n"), "\n".join(lines), flags=re.S)


def sentences(first: int, text: str) -> Iterator[tuple[int, str]]:
    """(line, sentence) of a text, with each piece of inline code as one word (`JOINT`)."""
    text = re.sub(r"`[^`]+`", lambda m: JOINT.join(m[0].split()) + "\n" * m[0].count("\n"), text)
    text = re.sub(r"\]\([^)\s]*\)", "]", text)
    paragraph: list[tuple[int, str]] = []

    def flush() -> Iterator[tuple[int, str]]:
        joined = " ".join(piece for _, piece in paragraph)
        starts, at = [], 0
        for line, piece in paragraph:
            starts.append((at, line))
            at += len(piece) + 1
        guarded = ABBREVIATION.sub(lambda m: m[0].replace(". ", "._"), joined)
        at = 0
        for part in SENTENCE.split(guarded):
            at = guarded.index(part, at)
            line = max((n for offset, n in starts if offset <= at), default=first)
            yield line, part.strip("*_ ").replace("._", ". ")
            at += len(part)
        paragraph.clear()

    for number, line in enumerate(text.splitlines(), first):
        stripped = line.strip()
        if not stripped or stripped.startswith((">>>", "...")) or HEADING.match(line):
            yield from flush()
        elif stripped.startswith("|"):
            yield from flush()
            for cell in stripped.strip("|").split("|"):
                paragraph.append((number, cell.strip()))
                yield from flush()
        else:
            ended = not paragraph or paragraph[-1][1].endswith((".", ":"))
            if BULLET.match(line) or (ended and ARGUMENT.match(line)):
                yield from flush()
                stripped = ARGUMENT.sub("", BULLET.sub("", stripped))
            paragraph.append((number, stripped))
    yield from flush()


# --- the rules ---


def fragment(sentence: str) -> str | None:
    """The first words of a sentence that has no main clause, as a key of STARTS or in ADVERBS."""
    if sentence.endswith(("?", ":")):
        return None
    for start in (*STARTS, *ADVERBS):
        if not sentence.startswith(f"{start} "):
            continue
        head, *clauses = re.split(r"[,;:] ", sentence)
        if start.startswith(("It", "What")):
            return start
        if not all(SUBORDINATE.match(clause.strip("*(")) for clause in clauses):
            return None  # most likely a main clause follows
        if start in ADVERBS or head.startswith("By default "):
            words = head.removeprefix(start)
            long = len(words.split()) > 3 and re.search(r"[a-z](?:s|ed)\b", words)
            return None if VERB.search(words) or long or len(words.split()) > 12 else start
        return start
    return None


def find(path: Path, root: Path = ROOT) -> list[Hit]:
    """The hits of one file, without the intended ones."""
    name = path.resolve().relative_to(root).as_posix()
    hits = []
    for first, text in blocks(path):
        for line, sentence in sentences(first, text):
            found = [k for k, r in RIDDLES.items() if re.search(r.pattern, sentence, re.IGNORECASE)]
            if not any("what" in k for k in found) and re.search(WHAT.pattern, sentence):
                found.append("... what")
            start = fragment(sentence)
            found += [f"{start} ..."] if start else []
            if found and not any(name == p and w in sentence for p, w in INTENDED):
                hits += [Hit(name, line, p, sentence.replace(JOINT, " ")) for p in found]
    return sorted(hits)


def files(places: list[str], root: Path = ROOT) -> list[Path]:
    """The Python, Markdown and notebook files below `places`."""
    kinds = ("*.py", "*.md", "*.ipynb")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *places],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return sorted(
        p for p in {root / n for n in listed} if any(p.match(k) for k in kinds) and p.exists()
    )


# --- the list of open files ---


def main(arguments: list[str]) -> None:
    places = [a for a in arguments if not a.startswith("-")]
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for path in files(places):
        for hit in find(path):
            counts[hit.path] += 1
            kinds[hit.pattern] += 1
            if "--counts" not in arguments:
                print(hit)
    reasons = {k: (r.why, r.instead) for k, r in (*RIDDLES.items(), ("... what", WHAT))}
    reasons |= {f"{k} ...": ADVERB for k in ADVERBS} | {
        f"{k} ...": why for k, why in STARTS.items()
    }
    print()
    for kind, count in kinds.most_common():
        why, instead = reasons[kind]
        print(f"{count:6} {kind}: {why}; write {instead}")
    print()
    for path, count in counts.most_common():
        print(f"{count:6} {path}")
    print(f"{counts.total():6} in {len(counts)} files")


if __name__ == "__main__":
    main(sys.argv[1:])
