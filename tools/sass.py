"""The machine code of GPU kernels as cuobjdump prints it: instructions, resources, and the control flow graph."""

import collections
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Opcodes, up to their first dot, by the unit that executes them. half: packed fp16, on units of fma and alu. lsu:
# everything that goes to shared or global memory, barriers in memory and copies included.
PIPES = {
    "tensor": "HGMMA IGMMA QGMMA BGMMA HMMA IMMA DMMA QMMA BMMA",
    "mufu": "MUFU I2F F2I F2F FRND POPC FLO BREV",
    "fma": "FFMA FMUL FADD FSWZADD IMAD IMUL IDP FFMA2 FMUL2 FADD2 FFMA32I FADD32I FMUL32I",
    "half": "HFMA2 HADD2 HMUL2 HMNMX2 HSET2 HSETP2 HADD2_32 HFMA2_32I HMUL2_32I",
    "alu": "LOP3 LOP ISETP FSETP PSETP ICMP SEL FSEL SHF SHL SHR LEA PRMT VIADD VIADDMNMX VIMNMX VIMNMX3 VHMNMX FMNMX "
    "FMNMX3 IMNMX IADD3 IADD IADD32I IABS PLOP3 F2FP I2FP F2IP I2IP MOV MOV32I P2R R2P FCHK FSET VABSDIFF VABSDIFF4 "
    "BMSK SGXT MOVM VOTE CS2R",
    "lsu": "LDS STS LDSM STSM LDG STG LDL STL LD ST LDC LDGSTS LDGDEPBAR ATOM ATOMS ATOMG RED REDUX REDG SHFL SYNCS "
    "UTMALDG UTMASTG UTMAREDG UTMAPF UTMACMDFLUSH UTMACCTL UBLKCP UBLKRED UBLKPF FENCE MEMBAR CCTL CCTLL ERRBAR S2R "
    "MATCH QSPC ARRIVES",
    "uniform": "R2UR S2UR VOTEU",  # and whatever else begins with U
    "control": "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT BSSY BSYNC BREAK BMOV WARPSYNC ENDCOLLECTIVE YIELD NOP "
    "NANOSLEEP BAR B2R WARPGROUP WARPGROUPSET DEPBAR ELECT USETMAXREG ACQBULK ACQSHMINIT PREEXIT KILL BPT RPCMOV LEPC",
}
PIPE_OF = {opcode: pipe for pipe, opcodes in PIPES.items() for opcode in opcodes.split()}
SPILLS = ("LDL", "STL")
SHARED_LOADS = ("LDS", "LDSM")
JUMPS = ("BRA", "JMP", "CALL", "WARPSYNC", "BSSY")
ENDS = ("EXIT", "RET", "BRX", "BRXU", "JMX", "JMXU", "KILL")
MAY_LEAVE = frozenset([*JUMPS, *ENDS, "BSYNC"])  # all others go on to the next instruction
NO_SCOREBOARD = 7

INSTRUCTION = re.compile(
    r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:(?P<guard>@!?U?P[0-9T]+)\s+)?(?P<opcode>[A-Z][\w.]*)"
    r"\s*(?P<operands>[^;]*?)\s*;\s*(?:/\* (?P<code>0x[0-9a-f]+) \*/)?"
)
FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
TARGET = re.compile(r"(0x[0-9a-f]+)\s*$")
ARCHITECTURE = "\tcode for sm_"  # before the kernels of each


class SassError(Exception):
    pass


@dataclasses.dataclass
class Instruction:
    address: int
    guard: str | None
    opcode: str
    operands: str
    code: tuple[str, ...] = ()

    def __post_init__(self):
        # Asked of each of hundreds of thousands.
        self.base = self.opcode.partition(".")[0]
        self.arrives = self.base == "ARRIVES" or self.opcode.startswith("SYNCS.ARRIVE")
        # The compiler fills up with loads that never run.
        self.loads_shared = self.base in SHARED_LOADS and self.guard != "@!PT"

    @property
    def pipe(self):
        return PIPE_OF.get(self.base) or ("uniform" if self.base.startswith("U") else "other")

    @functools.cached_property
    def target(self):
        """The address it may go to."""
        match = TARGET.search(self.operands) if self.base in JUMPS else None
        return int(match[1], 16) if match else None

    @functools.cached_property
    def control(self):
        """The scheduler's 21 bits in the code's second word."""
        if len(self.code) < 2:
            raise SassError(f"{self.address:#x} {self.opcode}: expected two words of code, found {len(self.code)}")
        return int(self.code[1], 16) >> 41 & 0x1FFFFF

    @property
    def scoreboard(self):
        """The one its result is counted on, or NO_SCOREBOARD."""
        return self.control >> 5 & 7

    @functools.cached_property
    def waits(self):
        """Bit s: it waits until nothing is counted on scoreboard s. So it does when its guard is false, too."""
        mask = self.control >> 11 & 0x3F
        if self.base == "DEPBAR" and (match := re.match(r"SB(\d), 0x0\b", self.operands)):
            mask |= 1 << int(match[1])
        return mask

    @property
    def by_lanes(self):
        """Whether each lane has an address of its own."""
        return self.base == "LDSM" or re.search(r"\[[^]]*\bR\d", self.operands) is not None

    def __str__(self):
        return " ".join(part for part in (f"{self.address:#x}", self.guard, self.opcode, self.operands) if part)

    @property
    def falls_through(self):
        if self.base in ENDS:
            return self.guard is not None
        if self.base in ("BRA", "JMP"):  # a predicate may come as an operand too; .DIV goes there only when diverged
            return self.guard is not None or ".DIV" in self.opcode or not self.operands.startswith("0x")
        return True


@dataclasses.dataclass
class Kernel:
    name: str
    instructions: list[Instruction]
    registers: int | None = None
    stack: int | None = None
    barriers: int | None = None

    @property
    def spills(self):
        return sum(instruction.base in SPILLS for instruction in self.instructions)

    @property
    def code_bytes(self):
        return 16 * len(self.instructions)

    @property
    def code(self):
        return [(one.opcode, one.operands, one.guard, one.code) for one in self.instructions]


def parse_sass(text):
    """{name: instructions} of what cuobjdump -sass prints."""
    kernels, current = {}, []
    for line in text.splitlines():
        # The most frequent lines first, every other one by far: an instruction's second word of code, alone.
        stripped = line.strip()
        if stripped.startswith("/* 0x"):
            if current:
                current[-1].code += (stripped[3:-3],)
        elif match := INSTRUCTION.match(line):
            address, guard, opcode, operands, code = match.groups()
            current.append(Instruction(int(address, 16), guard, opcode, operands, (code,) if code else ()))
        elif match := FUNCTION.match(line):
            current = kernels.setdefault(match[1], [])
    return kernels


def parse_resources(text):
    """{name: (registers, bytes of stack)} of what cuobjdump -res-usage prints."""
    pattern = re.compile(r"Function (\S+?):\s+REG:(\d+) STACK:(\d+)")
    return {match[1]: (int(match[2]), int(match[3])) for match in pattern.finditer(text)}


def parse_usage(text):
    """[(architecture, name, {"REG": registers, "STACK": bytes, "SHARED": bytes, ...})] of what -res-usage prints."""
    found, architecture, name = [], "", ""
    for line in text.splitlines():
        if match := re.match(r"arch = (\S+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function (\S+?):", line):
            name = match[1]
        elif name and "REG:" in line:
            found.append((architecture, name, {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", line)}))
    return found


def parse_barriers(text):
    """{name: barriers} of what cuobjdump -elf prints; kernels without any are not named."""
    result, current = {}, None
    wanted = False
    for line in text.splitlines():
        if line.startswith("."):
            current = line[len(".nv.info.") :].strip() if line.startswith(".nv.info.") else None
        elif "Attribute:" in line:
            wanted = "EIATTR_NUM_BARRIERS" in line
        elif wanted and current and (match := re.search(r"Value:\s+(0x[0-9a-f]+)", line)):
            result[current] = int(match[1], 16)
    return result


def blocks_of(instructions):
    """Basic blocks, as lists of instructions by their first address, and the addresses that follow each."""
    at = {instruction.address: index for index, instruction in enumerate(instructions)}
    # Where BSYNC goes on: behind itself, but for one that the compiler moved, which returns to where BSSY says.
    rejoin = collections.defaultdict(set)
    for instruction in instructions:
        if instruction.base == "BSSY" and instruction.target is not None:
            rejoin[instruction.operands.split(",")[0]].add(instruction.target)
    follow = {}  # of those that may leave: for most what follows is the next
    for index, instruction in enumerate(instructions):
        if instruction.base not in MAY_LEAVE:
            continue
        following = instructions[index + 1].address if index + 1 < len(instructions) else None
        addresses = set()
        if instruction.falls_through and following is not None:
            addresses.add(following)
        if instruction.base == "BSYNC":
            targets = rejoin[instruction.operands]
            if targets and following not in targets:
                addresses = set(targets)
        elif instruction.base != "BSSY" and instruction.target is not None:
            addresses.add(instruction.target)
        follow[instruction.address] = {address for address in addresses if address in at}

    def next_of(address):
        index = at[address] + 1
        return {instructions[index].address} if index < len(instructions) else set()

    begins = {instructions[0].address} if instructions else set()
    for address, addresses in follow.items():
        if addresses != next_of(address) and next_of(address):
            begins |= addresses | next_of(address)
    blocks = {}
    for instruction in instructions:
        if instruction.address in begins:
            blocks[instruction.address] = block = []
        block.append(instruction)
    edges = {}
    for first, block in blocks.items():
        last = block[-1].address
        edges[first] = follow[last] if last in follow else next_of(last)
    return blocks, edges


def reachable(start, edges):
    seen, waiting = set(), [start]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += edges[node]
    return seen


def short_name(name):
    """What tells one kernel from another: the fused kernel's configuration, else the mangled name.

    Of a function in an unnamed namespace only its own name: what comes before holds a hash of the file's path.
    """
    # A variant alone, or with whether the rest goes to the mean; of such a pair zeros at the end are not written.
    build = r"(?:XtlNS\w*?5BuildE)?(?:LNS\w*?7VariantE(\d)E)?(?:Lb(\d)E)?"
    config = rf"Config\w*?ILNS_5DTypeE(\d)ELNS\w*?9SelectionE(\d)ELi(\d+)E{build}"
    if match := re.search(rf"fused_forward\w*?{config}", name):
        words = (("f32", "fp16", "bf16"), ("2:4", "1:2"), None, ("wide", "narrow", "full", "general"), ("", "mean"))
        parts = [
            of[int(value or 0)] if of and int(value or 0) < len(of) else value
            for value, of in zip(match.groups(), words, strict=True)
        ]
        return " ".join(["fused", *filter(None, parts)])
    if match := re.search(r"_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_[0-9a-f]{8}(\d+)([a-zA-Z_]\w*)", name):
        own, rest = match[2][: int(match[1])], match[2][int(match[1]) :]
        return own + rest if rest.startswith("I") else own  # template arguments tell it from its like
    return name


def cuobjdump(*arguments):
    # The PyPI packages put their programs where no PATH leads. cuobjdump calls nvdisasm, which lies beside it.
    packages = [*sys.path, *map(str, (ROOT / ".venv" / "lib").glob("python3*/site-packages"))]
    places = [str(place) for package in packages for place in sorted(Path(package).glob("nvidia/*/bin"))]
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *places])
    program = shutil.which("cuobjdump", path=path)
    if not program:
        raise SassError(
            "cuobjdump: expected in PATH, found none; it is part of the CUDA toolkit and of the PyPI package "
            "nvidia-cuda-cuobjdump"
        )
    environment = {**os.environ, "PATH": path}
    result = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        raise SassError(f"cuobjdump {' '.join(arguments)}: {(result.stderr or result.stdout).strip()}")
    return result.stdout


def read_kernels(path):
    """{short name: kernel} of a file with machine code."""
    sass = parse_sass(cuobjdump("-sass", path))
    resources = parse_resources(cuobjdump("-res-usage", path))
    barriers = parse_barriers(cuobjdump("-elf", path))
    if not sass:
        raise SassError(f"{path}: no machine code in it")
    result = {}
    for name, instructions in sorted(sass.items(), key=lambda item: short_name(item[0])):
        registers, stack = resources.get(name, (None, None))
        short = short_name(name)
        known = name if short in result else short
        result[known] = Kernel(name, instructions, registers, stack, barriers.get(name, 0))
    return result
