"""Grammars of a text, rewritten as grammars of that text within a JSON string.

There, quotes, backslashes and control characters are spelled otherwise, with a backslash first. A lexer that has read a
line and meets a backslash cannot tell whether the line goes on (`\\"`) or ends (`\\n`), and does not go back. So
expressions that have such characters become rules, and terminals that hold them, too. Every character has one spelling,
the shortest; a class of characters leaves out control characters that have no short one.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache

from octavo.errors import InvalidParameterError

_SPECIAL = ['"', "\\", *map(chr, range(32))]
_SPELLED = {each: json.dumps(each)[1:-1] for each in _SPECIAL}
_SHORT = [each for each in _SPECIAL if len(_SPELLED[each]) == 2]
_ALL_BUT_SPECIAL = r'--["\\\x00-\x1f]'
_TOKEN = re.compile(
    r"""
      (?P<comment>//[^\n]*|\#[^\n]*)
    | (?P<import>%import\b[^\n]*)
    | (?P<range>"(?:\\.|[^"\\\n])"\s*\.\.\s*"(?:\\.|[^"\\\n])")
    | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<repeat>~(?=\s*\d))
    | (?P<foreign>[%@<&~"/])
    | (?P<other>[^%@<&~"/])
    """,
    re.VERBOSE,
)
_IMPORT = re.compile(r"%import\s+common\s*(?:\.\s*(\w+)\s*(?:->\s*(\w+))?|\.?\s*\(([\w\s,]+)\))\s*")
_COMMON = {  # terminals that a grammar may import and that have such characters
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"(\\.|[^"\\\n])*"', "SH_COMMENT": r"#[^\n]*", "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*", "C_COMMENT": r"\/\*([^*]|\*+[^*\/])*\*+\/",
}  # fmt: skip
_ATOM = re.compile(
    r"""
      (?P<open>\((?:(?!\?)|\?(?::|P?<\w+>)))
    | (?P<close>[)|])
    | (?P<count>(?:[*+?]|\{\d+(?:,\d*)?\})\??)
    | (?P<code>\\(?:[xu]\{([0-9a-fA-F]+)\}|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})))
    | (?P<kind>\\[pP](?:\{[^}]*\}|.))
    | (?P<escape>\\.)
    | (?P<class>\[\^?\]?(?:\\.|[^\[\]\\])*\])
    | (?P<any>\.)
    | (?P<plain>[^\^$()\[])
    | (?P<foreign>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_NAMED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_WITHOUT_SPECIAL = re.compile(r"\\p(?:\{[LNM]\w*\}|[LNM])")  # letters, numbers, marks


def in_json_object(name: str, lark: str) -> str:
    """Return the grammar of a JSON object whose one property, a string, follows a grammar in Lark's notation.

    Raises InvalidParameterError: the grammar uses what cannot be rewritten.
    """
    words = set(re.findall(r"\w+", lark))
    names: dict[str, str] = {}
    for word in sorted(words):
        if word == "start" or word.isupper():
            new = "text" if word == "start" else f"t_{word.lower()}"
            while new in words:
                new += "_"
            names[word] = new
    return _object(name, names.get("start", "text"), "".join(_rewritten(lark, names)))


def matching_in_json_object(name: str, pattern: str) -> str:
    """Return the grammar of a JSON object whose one property, a string, matches a regular expression as a whole.

    Raises InvalidParameterError: the expression uses what cannot be rewritten.
    """
    return _object(name, "text", f"text: {_expression(pattern, '')}")


def _object(name: str, start: str, rules: str) -> str:
    begin, end = json.dumps(f'{{{json.dumps(name)}: "'), json.dumps('"}')
    return f"start: {begin} {start} {end}\n{rules}\n"


def _rewritten(lark: str, names: Mapping[str, str]) -> Iterator[str]:
    for found in _TOKEN.finditer(lark):
        text = found[0]
        match found.lastgroup:
            case "comment":
                continue
            case "import":
                yield from _imported(text, names)
            case "range":
                first, last = map(_in_class, re.findall(r'"((?:\\.|[^"\\])+)"', text))
                yield _expression(f"[{first}-{last}]", "")
            case "string":
                yield _literal(text)
            case "regex":
                pattern, _, flags = text[1:].rpartition("/")
                yield _expression(pattern, flags)
            case "name":
                yield names.get(text, text)
            case "foreign":
                what = "rules, literals, regular expressions and common terminals"
                raise _fault(lark[found.start() : found.start() + 40].partition("\n")[0], what)
            case _:
                yield text


def _fault(text: str, limit: str) -> InvalidParameterError:
    return InvalidParameterError("grammar", text[:40], f"the grammar of a custom tool may only have {limit}")


def _imported(text: str, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the imported terminals as rules."""
    found = _IMPORT.fullmatch(text)
    if found is None:
        raise _fault(text, "imports from 'common'")
    one, alias, several = found.groups()
    for name in [one] if one else re.findall(r"\w+", several):
        rule = names.get(alias or name, alias or name)
        if name in _COMMON:
            yield f"{rule}: {_expression(_COMMON[name], '')}\n"
        else:
            yield f"%import common.{name}\n{rule}: {name}\n"


def _in_class(text: str) -> str:
    """Return the end of a range, as a literal has it, for a class of characters."""
    character = _value(f'"{text}"')
    return f"\\{character}" if character in r"\]^-[&~" else character


def _value(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError as error:
        raise _fault(text, "literals with JSON's escapes") from error


def _literal(text: str) -> str:
    value = _value(text.removesuffix("i"))
    if text.endswith("i") and any(each in _SPELLED for each in value):
        return _expression("".join(re.escape(each) for each in value), "i")
    return _quoted("".join(_SPELLED.get(each, each) for each in value)) + "i" * text.endswith("i")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _expression(pattern: str, flags: str) -> str:
    """Return a regular expression for Lark; one that has such characters as an expression of rules."""
    whole = f"/{pattern}/{flags}"
    if set(flags) - set("imsu"):
        raise _fault(whole, "the flags i, m, s and u")
    pattern = pattern.removeprefix("^")
    if re.search(r"(?<!\\)(?:\\\\)*\$$", pattern):
        pattern = pattern[:-1]
    found = list(_ATOM.finditer(pattern))
    atoms = [_atom(each, "s" in flags) for each in found]
    if any(each[0] == "[" for each in found):
        raise _fault(whole, r"classes of characters that end and hold no others; a bracket in one is \[")
    if not any(spellings for _, spellings in atoms):
        return f"/{_slashed(pattern)}/{flags}"
    if any(each.lastgroup == "foreign" for each in found):
        raise _fault(whole, "groups without flags and no anchors, beside quotes, backslashes and control characters")
    caseless = "i" if "i" in flags else ""
    last = max((at for at, each in enumerate(found) if each.lastgroup not in ("close", "count")), default=0)
    parts, is_empty = ["("], True  # whether an alternative has had nothing so far
    for at, (each, (plain, spellings)) in enumerate(zip(found, atoms, strict=True)):
        match each.lastgroup:
            case "open":
                parts.append("(")
                is_empty = True
            case "close":
                parts.append('""' * is_empty + each[0])
                is_empty = each[0] == "|"
            case "count":
                parts.append(each[0] if len(each[0]) == 1 else each[0].removesuffix("?"))
            case _:
                # A run at the end is one lexeme, as in the expression itself.
                is_run = at == last and at + 1 < len(found) and found[at + 1][0] in ("*", "+")
                stays = [f"/{plain}{'+' if is_run else ''}/{caseless}"] if plain else []
                parts.append(f"({' | '.join([*stays, *map(_quoted, spellings)])})")
                is_empty = False
    parts.append('""' * is_empty + ")")
    return " ".join(parts)


def _atom(found: re.Match[str], is_dot_all: bool) -> tuple[str, list[str]]:
    """Return what stays of an atom, as an expression, and the spellings of the others of its characters."""
    text = found[0]
    match found.lastgroup:
        case "kind" if not _WITHOUT_SPECIAL.fullmatch(text):
            raise _fault(text, "the properties of letters, numbers and marks")
        case "any":
            return _class(r"[\s\S]" if is_dot_all else r"[^\n]")
        case "class":
            return _class(text)
        case "escape" if text[1] in "sSDW":
            return _class(f"[{text}]")
    character = _character_of(found)
    if character in _SPELLED:
        return "", [_SPELLED[character]]
    return r"\/" if text == "/" else text, []


def _character_of(found: re.Match[str]) -> str:
    """Return the character that an atom stands for; nothing if it is none."""
    text = found[0]
    match found.lastgroup:
        case "code":
            return _character(next(group for group in found.groups()[4:8] if group is not None), text)
        case "escape":
            return _NAMED.get(text[1], "" if text[1].isalnum() else text[1])
        case "plain":
            return text
    return ""


def _character(digits: str, text: str) -> str:
    try:
        return chr(int(digits, 16))
    except (ValueError, OverflowError) as error:
        raise _fault(text, "characters of Unicode") from error


@lru_cache(maxsize=256)
def _class(text: str) -> tuple[str, list[str]]:
    if any(sign in text[1:] for sign in ("&&", "--", "~~")):
        raise _fault(text, "classes of characters without operations between them")
    asked = re.sub(r"\\[xu]\{([0-9a-fA-F]+)\}", lambda code: re.escape(_character(code[1], text)), text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            compiled = re.compile(_WITHOUT_SPECIAL.sub("a", asked))
    except (re.error, FutureWarning) as error:
        raise _fault(text, f"well-formed classes of characters: {error}") from error
    members = [each for each in _SHORT if compiled.fullmatch(each)]
    stays = text if not members else f"[{text}{_ALL_BUT_SPECIAL}]"
    return _slashed(stays), [_SPELLED[each] for each in members]


def _slashed(pattern: str) -> str:
    """Return an expression whose slashes do not end it."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern)
