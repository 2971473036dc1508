"""PTX text into instructions: what `ptxas` would read, as data.

Covers the subset of the language that the CuTe DSL's compiler writes for a kernel entry (PTX ISA, "Syntax" and
"Directives"): `.entry` with parameters, `.reg` and module-scope `.shared` declarations, labels, nested scopes of
inline assembly, predicated instructions. Anything else is a PtxError with its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from fa3gen.base.errors import UserError


class PtxError(UserError):
    """PTX that this parser does not understand; the message names the line."""


@dataclass(frozen=True, slots=True)
class Register:
    """A virtual register; names are unique in the kernel, also those of inner scopes."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """An integer constant as written, not yet cut to a width."""

    value: int


@dataclass(frozen=True, slots=True)
class FloatBits:
    """A floating-point constant, `0f` with 32 bits or `0d` with 64."""

    bits: int
    width: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name that is no register: a label, parameter, shared variable or special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, ...}`: registers taken together."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`, with `coordinates` where a tensor map is addressed: `[map, {c0, c1, ...}]`."""

    base: Operand
    offset: int
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """`a|b`: two destinations, the second a predicate."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Negated:
    """`!p`: a predicate taken the other way round."""

    operand: Operand


Operand = Register | Immediate | FloatBits | Symbol | Vector | Address | Pair | Negated
SINK = Symbol("_")  # "no destination"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `index` counts instructions of the kernel from 0, `line` lines of the PTX text from 1.

    `source` is (file, line) of the generated module, where the PTX holds line information.
    """

    index: int
    line: int
    mnemonic: str
    operands: tuple[Operand, ...]
    predicate: str | None
    negated: bool
    source: tuple[str, int] | None

    @property
    def opcode(self) -> str:
        """The mnemonic up to the first dot."""
        return self.mnemonic.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter: size and alignment in bytes."""

    name: str
    size: int
    align: int


@dataclass(frozen=True, slots=True)
class SharedVariable:
    """A module-scope `.shared` array; `size` is 0 for the dynamic one, whose size the launch says."""

    name: str
    size: int
    align: int
    dynamic: bool


@dataclass
class Kernel:
    """One `.entry`: instructions in order, and for each label the index of the instruction it stands before.

    `ctas_per_sm` is its `.minnctapersm`: how many CTAs are to share an SM.
    """

    name: str
    parameters: tuple[Parameter, ...]
    shared: tuple[SharedVariable, ...]
    local_bytes: int = 0
    ctas_per_sm: int = 1
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)  # name -> declared type, such as "b32" or "pred"
    local: dict[str, int] = field(default_factory=dict)  # `.local` variable -> byte offset

    @cached_property
    def numbers(self) -> dict[str, int]:
        """A number for each register, from 0."""
        return {name: number for number, name in enumerate(self.registers)}


_TOKEN = re.compile(
    r"\s*(%?[A-Za-z_$][\w$.]*|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[0-7]*U?|[1-9]\d*U?|"
    r"[{}\[\],|+\-!])"
)
_STATEMENT = re.compile(r"(?:@(!?)\s*([%\w$.]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_LABEL = re.compile(r"([A-Za-z_$][\w$]*)\s*:(?!:)")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", re.S)
_CTAS_PER_SM = re.compile(r"\.minnctapersm\s+(\d+)")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?")
_SHARED = re.compile(
    r"^\s*(\.extern|\.visible|\.weak)?\s*\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]\s*;", re.M
)
_LOCATION = re.compile(r"\.loc\s")  # and not `.local`
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_IGNORED_DIRECTIVES = (".pragma", ".branchtargets", ".maxntid", ".minnctapersm")


def parse(text: str) -> dict[str, Kernel]:
    """Every kernel of a PTX module by name. Raises PtxError."""
    files = {int(number): path for number, path in _FILE.findall(text)}
    text = _without_comments(text)
    shared = tuple(
        SharedVariable(name=name, size=int(size or 0), align=int(align), dynamic=linkage == ".extern")
        for linkage, align, name, size in _SHARED.findall(text)
    )
    kernels = {}
    for entry in _ENTRY.finditer(text):
        kernel = Kernel(name=entry.group(1), parameters=_parameters(entry.group(2)), shared=shared)
        if asked := _CTAS_PER_SM.search(entry.group(3)):
            kernel.ctas_per_sm = int(asked.group(1))
        end = _closing_brace(text, entry.end())
        _Body(kernel, files, first_line=text.count("\n", 0, entry.end()) + 1).read(text[entry.end() : end])
        kernels[kernel.name] = kernel
    if not kernels:
        raise PtxError("the PTX holds no .entry")
    return kernels


def _without_comments(text: str) -> str:
    """Blank out comments; line numbers stay."""
    text = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment.group().count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
    raise PtxError("a kernel's body has no closing brace")


def _parameters(text: str) -> tuple[Parameter, ...]:
    found = []
    for align, type_name, name, count in _PARAMETER.findall(text):
        size = int(count) if count else int(type_name[1:]) // 8
        found.append(Parameter(name=name, size=size, align=int(align or size)))
    return tuple(found)


class _Body:
    """Reads the statements of one kernel into a Kernel."""

    def __init__(self, kernel: Kernel, files: dict[int, str], first_line: int) -> None:
        self.kernel = kernel
        self.files = files
        self.line = first_line
        self.families: dict[str, str] = {}  # "%r" -> "b32", of `.reg .b32 %r<12>`
        self.scopes: list[dict[str, str]] = [{}]  # name as written -> unique name
        self.scope_count = 0
        self.source: tuple[str, int] | None = None

    def read(self, body: str) -> None:
        position = 0
        while position < len(body):
            character = body[position]
            if character.isspace():
                self.line += character == "\n"
                position += 1
            elif character == "{":
                self._open_scope(body, position)
                position += 1
            elif character == "}":
                self.scopes.pop()
                position += 1
            elif label := _LABEL.match(body, position):
                self.kernel.labels[self._resolve(label.group(1))] = len(self.kernel.instructions)
                position = label.end()
            else:
                # `.loc` ends with its line, everything else with a semicolon.
                end = body.find("\n" if _LOCATION.match(body, position) else ";", position)
                end = len(body) if end < 0 else end
                self._statement(body[position:end].strip())
                self.line += body.count("\n", position, end + 1)
                position = end + 1

    def _open_scope(self, body: str, position: int) -> None:
        """Enter a scope of inline assembly; its labels may be used before they are defined."""
        self.scope_count += 1
        inner = body[position + 1 : _closing_brace(body, position + 1)]
        names = {match.group(1) for match in re.finditer(r"(?:^|[;\s])([A-Za-z_$][\w$]*)\s*:(?!:)", inner)}
        self.scopes.append({name: f"{name}@{self.scope_count}" for name in names})

    def _resolve(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def _statement(self, text: str) -> None:
        if _LOCATION.match(text):
            self._location(text)
        elif text.startswith(".reg"):
            self._declare(text)
        elif text.startswith(".local"):
            self._declare_local(text)
        elif text.startswith(".") and not text.startswith(_IGNORED_DIRECTIVES):
            raise PtxError(f"PTX line {self.line}: directive not understood: {text.split()[0]}")
        elif text and not text.startswith("."):
            self._instruction(text)

    def _location(self, text: str) -> None:
        """`.loc file line column{, function_name name, inlined_at file line column}`.

        In inline assembly lines count the assembly's own, column 0 is nobody's line.
        """
        _, file, line, column, *_ = text.replace(",", " ").split()
        if len(self.scopes) == 1 and (int(column) > 0 or self.source is None):
            self.source = (self.files.get(int(file), "?"), int(line))

    def _declare(self, text: str) -> None:
        match = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S)
        if match is None:
            raise PtxError(f"PTX line {self.line}: declaration not understood: {text}")
        type_name = match.group(1)
        for item in match.group(2).split(","):
            item = item.strip()
            if family := re.fullmatch(r"(%?[\w$]+)<\d+>", item):
                self.families[family.group(1)] = type_name
                continue
            unique = item if len(self.scopes) == 1 else f"{item}@{self.scope_count}"
            self.scopes[-1][item] = unique
            self.kernel.registers[unique] = type_name

    def _declare_local(self, text: str) -> None:
        match = re.match(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]", text)
        if match is None:
            raise PtxError(f"PTX line {self.line}: declaration not understood: {text}")
        align = int(match.group(1))
        offset = -(-self.kernel.local_bytes // align) * align
        self.kernel.local[match.group(2)] = offset
        self.kernel.local_bytes = offset + int(match.group(3))

    def _instruction(self, text: str) -> None:
        match = _STATEMENT.fullmatch(text)
        if match is None:
            raise PtxError(f"PTX line {self.line}: instruction not understood: {text}")
        negation, predicate, mnemonic, rest = match.groups()
        if predicate is not None:
            predicate = self._resolve(predicate)
            self._is_register(predicate)
        operands = tuple(_Operands(rest, self).read())
        self.kernel.instructions.append(
            Instruction(
                index=len(self.kernel.instructions),
                line=self.line,
                mnemonic=mnemonic,
                operands=operands,
                predicate=predicate,
                negated=bool(negation),
                source=self.source,
            )
        )

    def _is_register(self, name: str) -> bool:
        """Whether `name` is a declared register; members of a family are entered when first met."""
        if name in self.kernel.registers:
            return True
        member = re.fullmatch(r"(%[A-Za-z_$]+)\d+", name)
        if member is None or member.group(1) not in self.families:
            return False
        self.kernel.registers[name] = self.families[member.group(1)]
        return True

    def operand_name(self, name: str) -> Register | Symbol:
        """The register or symbol that `name` stands for in the present scope."""
        unique = self._resolve(name)
        return Register(unique) if self._is_register(unique) else Symbol(unique)


class _Operands:
    """Reads the operands of one instruction."""

    def __init__(self, text: str, body: _Body) -> None:
        self.text = text
        self.body = body
        self.tokens = _TOKEN.findall(text)
        self.position = 0
        if "".join(self.tokens) != re.sub(r"\s", "", text):
            raise PtxError(f"PTX line {body.line}: operands not understood: {text}")

    def read(self) -> Iterator[Operand]:
        if not self.tokens:
            return
        yield self._operand()
        while self.position < len(self.tokens):
            self._expect(",")
            yield self._operand()

    def _next(self) -> str:
        if self.position >= len(self.tokens):
            raise PtxError(f"PTX line {self.body.line}: operands end too early: {self.text}")
        self.position += 1
        return str(self.tokens[self.position - 1])

    def _integer(self) -> int:
        token = self._next()
        if not token[0].isdigit():
            raise PtxError(f"PTX line {self.body.line}: a number expected, found {token!r} in {self.text}")
        return _integer(token)

    def _at(self, token: str) -> bool:
        return self.position < len(self.tokens) and self.tokens[self.position] == token

    def _expect(self, token: str) -> None:
        found = self._next()
        if found != token:
            raise PtxError(f"PTX line {self.body.line}: expected {token!r}, found {found!r} in {self.text}")

    def _operand(self) -> Operand:
        token = self._next()
        if token == "{":
            return Vector(tuple(self._list("}")))
        if token == "[":
            return self._address()
        if token == "-":
            return Immediate(-self._integer())
        if token == "!":
            return Negated(self._operand())
        first: Operand
        if token[:2] in ("0f", "0F", "0d", "0D"):
            first = FloatBits(int(token[2:], 16), 32 if token[1] in "fF" else 64)
        elif token[0].isdigit():
            first = Immediate(_integer(token))
        else:
            first = self.body.operand_name(token)
        if self._at("|"):
            self._next()
            return Pair(first, self._operand())
        return first

    def _list(self, closing: str) -> Iterator[Operand]:
        yield self._operand()
        while not self._at(closing):
            self._expect(",")
            yield self._operand()
        self._next()

    def _address(self) -> Address:
        base = self._operand()
        offset = 0
        coordinates: tuple[Operand, ...] = ()
        while not self._at("]"):
            token = self._next()
            if token in ("+", "-"):
                if self._at("-"):
                    self._next()
                    token = "-" if token == "+" else "+"
                offset += self._integer() * (1 if token == "+" else -1)
            elif token == ",":
                vector = self._operand()
                if not isinstance(vector, Vector):
                    raise PtxError(f"PTX line {self.body.line}: coordinates expected in {self.text}")
                coordinates = vector.items
            else:
                raise PtxError(f"PTX line {self.body.line}: address not understood: {self.text}")
        self._next()
        return Address(base, offset, coordinates)


def _integer(token: str) -> int:
    digits = token.rstrip("U")
    return int(digits, 8) if re.fullmatch(r"0[0-7]+", digits) else int(digits, 0)


def registers_in(operand: Operand) -> Iterator[str]:
    """Names of the registers that an operand mentions."""
    match operand:
        case Register(name):
            yield name
        case Vector(items):
            for item in items:
                yield from registers_in(item)
        case Address(base, _, coordinates):
            yield from registers_in(base)
            for item in coordinates:
                yield from registers_in(item)
        case Pair(first, second):
            yield from registers_in(first)
            yield from registers_in(second)
        case Negated(inner):
            yield from registers_in(inner)
