#!/usr/bin/env python3
"""What the compiler made of the GPU kernels in a file: resources, and the instructions of each kernel's main loop.

    tools/sass_report.py out/variants/new.so              a cubin, an object, a shared library
    tools/sass_report.py .,bf16,2:4,64 --kernel narrow    one instance, TREE,TYPE,PATTERN,DIM[,flag...]
    tools/sass_report.py --diff out/variants/base.so out/variants/new.so
    tools/sass_report.py --arrivals build/release/src/cuda/sm90/CMakeFiles/*/*.cu.o

The main loop is, of the innermost loops with tensor core products, the one with the most of them. Loops are those of
the control flow graph: what the compiler moved behind the kernel's end counts where it belongs. `shortest`: the way
round the loop with the fewest instructions, which waits for nothing and leaves out what need not be; `all`: the loop's
whole code. Instructions are told apart by the unit that executes them (PIPES). Spills are loads and stores of local
memory. --diff says which kernels are the same bit by bit and what changed in the others, and exits with 1 when any is
not the same.

--arrivals finds the arrivals at barriers in shared memory that may overtake a load: on Hopper an arrival does not wait
for the same warp's earlier loads from shared memory, and the compiler does not make it wait. Whoever the arrival wakes,
the copy engine above all, may then overwrite what the load has yet to read. An arrival is safe when on every way to it
from the load some instruction, or the arrival itself, waits for the load's result. Exits with 1 when any is not.
Reported are loads for which each lane has an address of its own: so tiles are read, which is what arrivals hand over.
Not reported are loads of one address for the whole warp, made of uniform registers and constants alone: so the
description of a work item is read, which threads write with plain stores and which stays as it is beyond the item's
arrivals. A load by lanes of memory that the arrival does not hand over is reported too: use its result before.

Needs cuobjdump and nvdisasm, of the CUDA toolkit or of the PyPI packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm; an instance also needs nvcc.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import heapq
import os
import re
import shutil
import subprocess
import sys
import tempfile
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
NO_SCOREBOARD = 7
SHOWN_LOADS = 4  # of an arrival

INSTRUCTION = re.compile(
    r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:(?P<guard>@!?U?P[0-9T]+)\s+)?(?P<opcode>[A-Z][\w.]*)"
    r"\s*(?P<operands>[^;]*?)\s*;\s*(?:/\* (?P<code>0x[0-9a-f]+) \*/)?"
)
MORE_CODE = re.compile(r"^\s+/\* (0x[0-9a-f]+) \*/\s*$")
FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
TARGET = re.compile(r"(0x[0-9a-f]+)\s*$")
ARCHITECTURE = re.compile(r"^\s*code for sm_", re.MULTILINE)


class ReportError(Exception):
    pass


@dataclasses.dataclass
class Instruction:
    address: int
    guard: str | None
    opcode: str
    operands: str
    code: tuple[str, ...] = ()

    @property
    def base(self):
        return self.opcode.split(".")[0]

    @property
    def pipe(self):
        return PIPE_OF.get(self.base) or ("uniform" if self.base.startswith("U") else "other")

    @property
    def target(self):
        """The address it may go to."""
        match = TARGET.search(self.operands)
        return int(match[1], 16) if match and self.base in ("BRA", "JMP", "CALL", "WARPSYNC", "BSSY") else None

    @property
    def control(self):
        """The scheduler's 21 bits in the code's second word."""
        if len(self.code) < 2:
            raise ReportError(f"{self.address:#x} {self.opcode}: expected two words of code, found {len(self.code)}")
        return int(self.code[1], 16) >> 41 & 0x1FFFFF

    @property
    def scoreboard(self):
        """The one its result is counted on, or NO_SCOREBOARD."""
        return self.control >> 5 & 7

    @property
    def waits(self):
        """Bit s: it waits until nothing is counted on scoreboard s. So it does when its guard is false, too."""
        mask = self.control >> 11 & 0x3F
        if self.base == "DEPBAR" and (match := re.match(r"SB(\d), 0x0\b", self.operands)):
            mask |= 1 << int(match[1])
        return mask

    @property
    def arrives(self):
        return self.opcode.startswith("SYNCS.ARRIVE") or self.base == "ARRIVES"

    @property
    def loads_shared(self):
        return self.base in SHARED_LOADS and self.guard != "@!PT"  # the compiler fills up with loads that never run

    @property
    def by_lanes(self):
        """Whether each lane has an address of its own."""
        return self.base == "LDSM" or re.search(r"\[[^]]*\bR\d", self.operands) is not None

    def __str__(self):
        return " ".join(part for part in (f"{self.address:#x}", self.guard, self.opcode, self.operands) if part)

    @property
    def falls_through(self):
        if self.base == "EXIT" or self.base in ("RET", "BRX", "BRXU", "JMX", "JMXU", "KILL"):
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


@dataclasses.dataclass
class Loop:
    first: int  # address
    last: int
    tensor: int
    shortest: collections.Counter  # instructions by pipe
    all: collections.Counter
    unknown: set[str]  # opcodes of no known pipe


def parse_sass(text):
    """{name: instructions} of what cuobjdump -sass prints."""
    kernels, current = {}, []
    for line in text.splitlines():
        if match := FUNCTION.match(line):
            current = kernels.setdefault(match[1], [])
        elif match := INSTRUCTION.match(line):
            found = match.groupdict()
            code = (found["code"],) if found["code"] else ()
            address = int(found["address"], 16)
            current.append(Instruction(address, found["guard"], found["opcode"], found["operands"], code))
        elif (match := MORE_CODE.match(line)) and current:
            current[-1].code += (match[1],)
    return kernels


def parse_resources(text):
    """{name: (registers, bytes of stack)} of what cuobjdump -res-usage prints."""
    pattern = re.compile(r"Function (\S+?):\s+REG:(\d+) STACK:(\d+)")
    return {match[1]: (int(match[2]), int(match[3])) for match in pattern.finditer(text)}


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
    follow = {}
    for index, instruction in enumerate(instructions):
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
    begins = {instructions[0].address} if instructions else set()
    for index, instruction in enumerate(instructions[:-1]):
        following = instructions[index + 1].address
        if follow[instruction.address] != {following}:
            begins |= follow[instruction.address] | {following}
    blocks, edges = {}, {}
    for instruction in instructions:
        if instruction.address in begins:
            blocks[instruction.address] = block = []
            first = instruction.address
        block.append(instruction)
        edges[first] = follow[instruction.address]
    return blocks, edges


def reachable(start, edges):
    seen, waiting = set(), [start]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += edges[node]
    return seen


def components(nodes, edges):
    """Strongly connected sets of nodes (Tarjan, without recursion) that contain a cycle."""
    index, low, on_stack, stack, result = {}, {}, set(), [], []
    for root in sorted(nodes):
        if root in index:
            continue
        work = [(root, iter(sorted(edges[root] & nodes)))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, successors = work[-1]
            for successor in successors:
                if successor not in index:
                    index[successor] = low[successor] = len(index)
                    stack.append(successor)
                    on_stack.add(successor)
                    work.append((successor, iter(sorted(edges[successor] & nodes))))
                    break
                if successor in on_stack:
                    low[node] = min(low[node], index[successor])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = set()
                    while node not in component:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.add(member)
                    if len(component) > 1 or node in edges[node]:
                        result.append(component)
    return result


def loops_of(nodes, edges):
    """(blocks, header) of all loops, an outer one before those within it."""
    result = []
    for component in components(nodes, edges):
        entered = {to for node in nodes - component for to in edges[node] & component}
        header = min(entered or component)
        result.append((component, header))
        inner = {node: edges[node] - ({header} if node in component else set()) for node in nodes}
        result += loops_of(component, inner)
    return result


def main_loop(instructions):
    """The innermost loop with the most tensor core products, or None."""
    if not instructions:
        return None
    blocks, edges = blocks_of(instructions)
    products = {first: sum(one.pipe == "tensor" for one in block) for first, block in blocks.items()}
    live = reachable(instructions[0].address, edges)
    found = [loop for loop in loops_of(live, edges) if any(products[node] for node in loop[0])]
    innermost = [loop for loop in found if not any(other[0] < loop[0] for other in found)]
    if not innermost:
        return None
    nodes, header = max(innermost, key=lambda loop: sum(products[node] for node in loop[0]))
    way = shortest_way_round(header, {node: edges[node] & nodes for node in nodes}, blocks)
    pipes = {node: collections.Counter(one.pipe for one in blocks[node]) for node in nodes}
    unknown = {one.base for node in nodes for one in blocks[node] if one.pipe == "other"}
    last = max(blocks[node][-1].address for node in nodes if header in edges[node])
    shortest, everything = (sum((pipes[node] for node in some), collections.Counter()) for some in (way, nodes))
    return Loop(header, last, everything["tensor"], shortest, everything, unknown)


def shortest_way_round(header, edges, blocks):
    """The blocks of a way from the header back to it with the fewest instructions (Dijkstra)."""
    waiting, seen = [(len(blocks[header]), [header])], set()
    while waiting:
        length, way = heapq.heappop(waiting)
        if way[-1] in seen:
            continue
        if header in edges[way[-1]]:
            return way
        for node in edges[way[-1]] - seen:
            heapq.heappush(waiting, (length + len(blocks[node]), [*way, node]))
        seen.add(way[-1])
    return []


def returns_of(blocks, edges):
    """The edges from the end of a called function to behind its calls."""
    result = collections.defaultdict(set)
    for block in blocks.values():
        call = block[-1]
        if call.base == "CALL" and call.target in blocks:
            behind = edges[block[0].address] - {call.target}
            for node in reachable(call.target, edges):
                if blocks[node][-1].base == "RET":
                    result[node] |= behind
    return result


def pass_block(block, pending, arrivals=None):
    """What is on its way behind a block, of what was before it; notes what is so at each arrival.

    pending: {load: scoreboards}, a wait on any of which shows that the load has returned. Loads return in order, so a
    later load's scoreboard shows it too; the compiler relies on it and gives many loads no scoreboard of their own.
    """
    for instruction in block:
        waits = instruction.waits
        pending = {load: mask for load, mask in pending.items() if not mask & waits}
        if arrivals is not None and instruction.arrives:
            arrivals[instruction.address] = sorted(pending)
        if instruction.loads_shared:
            own = 1 << instruction.scoreboard if instruction.scoreboard != NO_SCOREBOARD else 0
            if instruction.guard is None:  # one that does not run counts on no scoreboard
                pending = {load: mask | own for load, mask in pending.items()}
            pending[instruction.address] = own
    return pending


def overtaking_arrivals(instructions):
    """[(arrival, loads)]: the loads by lanes that may be on their way at the arrival on some way to it."""
    if not any(instruction.arrives for instruction in instructions):
        return []
    at = {instruction.address: instruction for instruction in instructions}
    blocks, edges = blocks_of(instructions)
    returns = returns_of(blocks, edges)
    before = {instructions[0].address: {}}
    waiting = [instructions[0].address]
    while waiting:
        node = waiting.pop()
        behind = pass_block(blocks[node], before[node])
        for following in edges[node] | returns[node]:
            # Where ways meet, on its way is what is so on any of them, and a wait counts that counts on all of them.
            known = before.get(following)
            met = behind
            if known is not None:
                met = {load: behind.get(load, -1) & known.get(load, -1) for load in [*behind, *known]}
            if met != known:
                before[following] = met
                waiting.append(following)
    arrivals = {}
    for node, pending in before.items():
        pass_block(blocks[node], pending, arrivals)
    found = ((at[arrival], [at[load] for load in loads if at[load].by_lanes]) for arrival, loads in arrivals.items())
    return sorted(((arrival, loads) for arrival, loads in found if loads), key=lambda one: one[0].address)


def arrivals_report(text, wanted=""):
    """(lines, arrivals that may overtake a load, arrivals) of what cuobjdump -sass prints, kernel by kernel."""
    lines, overtaking, arrivals = [], 0, 0
    for part in ARCHITECTURE.split(text):  # a file may hold a kernel for several
        if "ARRIVE" not in part:
            continue
        for name, instructions in sorted(parse_sass(part).items(), key=lambda item: short_name(item[0])):
            if wanted not in short_name(name):
                continue
            found = overtaking_arrivals(instructions)
            overtaking += len(found)
            arrivals += sum(instruction.arrives for instruction in instructions)
            if found:
                lines.append(f"{short_name(name)}: {len(found)} arrivals may overtake loads from shared memory")
            for arrival, loads in found:
                lines.append(f"  {arrival} may overtake {len(loads)}:")
                lines += [f"    {load}" for load in loads[:SHOWN_LOADS]]
                if len(loads) > SHOWN_LOADS:
                    lines.append(f"    and {len(loads) - SHOWN_LOADS} more")
    return lines, overtaking, arrivals


def report_arrivals(files, wanted):
    """Prints the findings of all files; whether there are none."""
    overtaking, arrivals = 0, 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # the next file is disassembled meanwhile
        for file, text in zip(files, pool.map(lambda file: cuobjdump("-sass", file), files), strict=True):
            if not FUNCTION.search(text):
                raise ReportError(f"{file}: no machine code in it")
            lines, *counts = arrivals_report(text, wanted)
            overtaking, arrivals = overtaking + counts[0], arrivals + counts[1]
            if lines:
                print("\n".join([f"=== {file}", *lines]))
    if not arrivals:
        raise ReportError("no arrival in any kernel: nothing was checked")
    print(f"{overtaking} of {arrivals} arrivals may overtake loads from shared memory")
    return not overtaking


def short_name(name):
    """What tells one kernel from another: the fused kernel's configuration, else the mangled name.

    Of a function in an unnamed namespace only its own name: what comes before holds a hash of the file's path.
    """
    config = r"Config\w*?ILNS_5DTypeE(\d)ELNS\w*?9SelectionE(\d)ELi(\d+)ELNS\w*?7VariantE(\d)E"
    if match := re.search(rf"fused_forward\w*?{config}", name):
        words = (("f32", "fp16", "bf16"), ("2:4", "1:2"), None, ("wide", "narrow", "general"))
        parts = [
            of[int(value)] if of and int(value) < len(of) else value
            for value, of in zip(match.groups(), words, strict=True)
        ]
        return "fused " + " ".join(parts)
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
        raise ReportError(
            "cuobjdump: expected in PATH, found none; it is part of the CUDA toolkit and of the PyPI package "
            "nvidia-cuda-cuobjdump"
        )
    environment = {**os.environ, "PATH": path}
    result = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        raise ReportError(f"cuobjdump {' '.join(arguments)}: {(result.stderr or result.stdout).strip()}")
    return result.stdout


def read_kernels(path):
    """{short name: kernel} of a file with machine code."""
    sass = parse_sass(cuobjdump("-sass", path))
    resources = parse_resources(cuobjdump("-res-usage", path))
    barriers = parse_barriers(cuobjdump("-elf", path))
    if not sass:
        raise ReportError(f"{path}: no machine code in it")
    result = {}
    for name, instructions in sorted(sass.items(), key=lambda item: short_name(item[0])):
        registers, stack = resources.get(name, (None, None))
        short = short_name(name)
        known = name if short in result else short
        result[known] = Kernel(name, instructions, registers, stack, barriers.get(name, 0))
    return result


def compile_instance(text, folder):
    """TREE,TYPE,PATTERN,DIM[,flag...] to a cubin."""
    sys.path.insert(0, str(ROOT / "bench"))
    import variants_build

    tree, *fields = text.split(",")
    if len(fields) < 3 or fields[0] not in variants_build.TYPES or fields[1] not in variants_build.PATTERNS:
        raise ReportError(f'expected a file, or TREE,TYPE,PATTERN,DIM[,flag...] such as .,bf16,2:4,64, got "{text}"')
    try:
        version = variants_build.parse_version(",".join([f"instance={tree}", *fields[3:]]))
        instance = variants_build.Instance(fields[0], fields[1], int(fields[2]))
        source = variants_build.write_instance(version, instance, folder, general=True)
        target = folder / f"{instance.name}.cubin"
        # Unchecked: a kernel that spills is to be looked at.
        variants_build.run(
            variants_build.compile_command(
                variants_build.compiler(), version, source, target, checked=False, action="-cubin"
            )
        )
    except (ValueError, variants_build.BuildError) as error:
        raise ReportError(str(error)) from None
    return target


def load(text):
    if Path(text).is_file():
        return read_kernels(text)
    with tempfile.TemporaryDirectory() as folder:
        return read_kernels(str(compile_instance(text, Path(folder))))


def resources_line(kernel):
    known = [
        f"{'?' if value is None else value} {what}"
        for value, what in (
            (kernel.registers, "registers"),
            (kernel.spills, "spills"),
            (kernel.stack, "bytes of stack"),
        )
    ]
    return ", ".join([*known, f"{kernel.barriers} barriers", f"{kernel.code_bytes} bytes of code"])


def loop_lines(loop):
    if loop is None:
        return ["  no loop with tensor core products"]
    lines = [f"  main loop {loop.first:#x} to {loop.last:#x}, {loop.tensor} products"]
    lines.append(f"  {'':8} {'shortest':>9} {'all':>6}")
    for pipe in [*PIPES, "other"]:
        if pipe != "other" or loop.all[pipe]:
            lines.append(f"  {pipe:8} {loop.shortest[pipe]:9} {loop.all[pipe]:6}")
    lines.append(f"  {'total':8} {loop.shortest.total():9} {loop.all.total():6}")
    if loop.unknown:
        lines.append(f"  other: {' '.join(sorted(loop.unknown))}")
    return lines


def report(kernels):
    lines = []
    for name, kernel in kernels.items():
        lines += [f"{name}: {resources_line(kernel)}", *loop_lines(main_loop(kernel.instructions))]
    return lines


def changed(before, after):
    return f"{before} -> {after}" if before != after else f"{after}"


def difference(before, after):
    """(lines, whether all kernels are the same)."""
    lines, same = [], True
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            lines.append(f"{name}: only in the {'second' if old is None else 'first'}")
            same = False
            continue
        if old.code == new.code and (old.registers, old.barriers) == (new.registers, new.barriers):
            lines.append(f"{name}: same")
            continue
        same = False
        lines.append(f"{name}: differs")
        lines += [f"  before: {resources_line(old)}", f"  after:  {resources_line(new)}"]
        loops = [main_loop(kernel.instructions) for kernel in (old, new)]
        if None in loops:
            lines += [f"  main loop: {changed(*('none' if loop is None else 'there' for loop in loops))}"]
            continue
        old_loop, new_loop = loops
        lines.append(f"  main loop, {changed(old_loop.tensor, new_loop.tensor)} products")
        lines.append(f"  {'':8} {'shortest':>14} {'all':>14}")
        for pipe in [*PIPES, "other"]:
            if old_loop.all[pipe] or new_loop.all[pipe]:
                shortest = changed(old_loop.shortest[pipe], new_loop.shortest[pipe])
                lines.append(f"  {pipe:8} {shortest:>14} {changed(old_loop.all[pipe], new_loop.all[pipe]):>14}")
        shortest = changed(old_loop.shortest.total(), new_loop.shortest.total())
        lines.append(f"  {'total':8} {shortest:>14} {changed(old_loop.all.total(), new_loop.all.total()):>14}")
    return lines, same


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="cubin, object, shared library, or an instance")
    parser.add_argument("--diff", action="store_true", help="compare two")
    parser.add_argument("--arrivals", action="store_true", help="find arrivals that may overtake loads")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    arguments = parser.parse_args(argv)
    if arguments.diff and len(arguments.files) != 2:
        parser.error(f"--diff: expected two files, got {len(arguments.files)}")
    if arguments.diff and arguments.arrivals:
        parser.error("--diff and --arrivals: expected one of them")
    try:
        if arguments.arrivals:
            return 0 if report_arrivals(arguments.files, arguments.kernel) else 1
        loaded = [
            {name: kernel for name, kernel in load(file).items() if arguments.kernel in name}
            for file in arguments.files
        ]
        if not any(loaded):
            raise ReportError(f'no kernel with "{arguments.kernel}" in its name')
    except ReportError as error:
        print(f"sass_report: {error}", file=sys.stderr)
        return 2
    if arguments.diff:
        lines, same = difference(*loaded)
        print("\n".join(lines))
        return 0 if same else 1
    for file, kernels in zip(arguments.files, loaded, strict=True):
        print("\n".join([*([f"=== {file}"] if len(loaded) > 1 else []), *report(kernels)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
