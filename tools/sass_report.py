#!/usr/bin/env python3
"""What the compiler made of the GPU kernels in a file: resources, and the instructions of each kernel's main loop.

    tools/sass_report.py out/variants/new.so              a cubin, an object, a shared library
    tools/sass_report.py .,bf16,2:4,64 --kernel narrow    one instance, TREE,TYPE,PATTERN,DIM[,flag...]
    tools/sass_report.py --diff out/variants/base.so out/variants/new.so
    tools/sass_report.py --arrivals build/release/src/cuda/sm90/CMakeFiles/*/*.cu.o
    tools/sass_report.py --spills build/release/src/cuda/sm90/CMakeFiles/*/*.cu.o

The main loop is, of the innermost loops with tensor core products, the one with the most of them. Loops are those of
the control flow graph: what the compiler moved behind the kernel's end counts where it belongs. `shortest`: the way
round the loop with the fewest instructions, which waits for nothing and leaves out what need not be; `all`: the loop's
whole code. Instructions are told apart by the unit that executes them (sass.PIPES). Spills are loads and stores of
local memory. --diff says which kernels are the same bit by bit and what changed in the others, and exits with 1 when
any is not the same.

--arrivals finds the arrivals at barriers in shared memory that may overtake a load: on Hopper an arrival does not wait
for the same warp's earlier loads from shared memory, and the compiler does not make it wait. Whoever the arrival wakes,
TMA above all, may then overwrite what the load has yet to read. An arrival is safe when on every way to it
from the load some instruction, or the arrival itself, waits for the load's result. Exits with 1 when any is not.
Reported are loads for which each lane has an address of its own: so tiles are read, which is what arrivals hand over.
Not reported are loads of one address for the whole warp, made of uniform registers and constants alone: so the
description of a work item is read, which threads write with plain stores and which stays as it is beyond the item's
arrivals. A load by lanes of memory that the arrival does not hand over is reported too: use its result before.

--spills finds spills in loops with tensor core products, the innermost of them: elsewhere they cost next to nothing.
Exits with 1 when there are any. With --arrivals both are looked for in one pass: disassembling takes most of the time.

--resources only says what kernels take, for every architecture in the file, and disassembles nothing. Exits with 1
where one uses local memory, to which registers are spilled, or with --shared more shared memory of its own than that,
without the 1 KiB that the driver takes on Hopper.

Needs cuobjdump and nvdisasm, of the CUDA toolkit or of the PyPI packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm; an instance also needs nvcc.
"""

import argparse
import collections
import dataclasses
import heapq
import sys
import tempfile
from pathlib import Path

import sass
import sass_arrivals


@dataclasses.dataclass
class Loop:
    first: int  # address
    last: int
    tensor: int
    shortest: collections.Counter  # instructions by pipe
    all: collections.Counter
    unknown: set[str]  # opcodes of no known pipe


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


def product_loops(instructions):
    """(loops with tensor core products, the innermost of them; blocks; edges; products of a block)."""
    blocks, edges = sass.blocks_of(instructions)
    products = {first: sum(one.pipe == "tensor" for one in block) for first, block in blocks.items()}
    live = sass.reachable(instructions[0].address, edges)
    found = [loop for loop in loops_of(live, edges) if any(products[node] for node in loop[0])]
    return [loop for loop in found if not any(other[0] < loop[0] for other in found)], blocks, edges, products


def spills_in_loops(instructions):
    """Loads and stores of local memory in the innermost loops with tensor core products."""
    if not any(one.base in sass.SPILLS for one in instructions):
        return 0
    loops, blocks, _, _ = product_loops(instructions)
    nodes = set().union(*(loop[0] for loop in loops)) if loops else set()
    return sum(one.base in sass.SPILLS for node in nodes for one in blocks[node])


def spills_line(name, instructions):
    """What is said of a kernel with such spills; of others nothing."""
    count = spills_in_loops(instructions)
    return f"{name}: {count} loads and stores of spilled registers in loops with products" if count else None


def report_spills(files, part):
    """Prints every kernel with such spills; whether there is none."""
    found = 0
    for file in files:
        for name, kernel in load(file).items():
            if part in name and (line := spills_line(name, kernel.instructions)):
                print(f"{line} ({file})")
                found += 1
    return found == 0


def main_loop(instructions):
    """The innermost loop with the most tensor core products, or None."""
    if not instructions:
        return None
    innermost, blocks, edges, products = product_loops(instructions)
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


def compile_instance(text, folder):
    """TREE,TYPE,PATTERN,DIM[,flag...] to a cubin."""
    sys.path.insert(0, str(sass.ROOT))
    from bench.variants import build as variants_build

    tree, *fields = text.split(",")
    if len(fields) < 3 or fields[0] not in variants_build.TYPES or fields[1] not in variants_build.PATTERNS:
        raise sass.SassError(f'expected a file, or TREE,TYPE,PATTERN,DIM[,flag...] such as .,bf16,2:4,64, got "{text}"')
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
        raise sass.SassError(str(error)) from None
    return target


def load(text):
    if Path(text).is_file():
        return sass.read_kernels(text)
    with tempfile.TemporaryDirectory() as folder:
        return sass.read_kernels(str(compile_instance(text, Path(folder))))


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
    for pipe in [*sass.PIPES, "other"]:
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


def report_resources(files, wanted, shared):
    """Prints what kernels take; whether none uses local memory or too much shared memory of its own."""
    good, known = True, 0
    for file in files:
        for architecture, name, usage in sass.parse_usage(sass.cuobjdump("-res-usage", file)):
            if wanted not in name:
                continue
            known += 1
            own = usage["SHARED"] - (1024 if architecture >= "sm_90" else 0)
            wrong = usage["STACK"] > 0 or usage["LOCAL"] > 0 or (shared is not None and own > shared)
            good = good and not wrong
            print(
                f"{sass.short_name(name)}, {architecture}: {usage['REG']} registers, {usage['STACK']} bytes of stack, "
                f"{own} bytes of shared memory of its own{' TOO MUCH' if wrong else ''}"
            )
    if known == 0:
        raise sass.SassError(f'no kernel with "{wanted}" in its name')
    return good


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
        for pipe in [*sass.PIPES, "other"]:
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
    parser.add_argument("--spills", action="store_true", help="find spills in loops with products")
    parser.add_argument("--resources", action="store_true", help="registers, stack, shared memory; 1 with local memory")
    parser.add_argument("--shared", type=int, help="--resources: 1 with more bytes of shared memory of its own")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    arguments = parser.parse_args(argv)
    if arguments.diff and len(arguments.files) != 2:
        parser.error(f"--diff: expected two files, got {len(arguments.files)}")
    if arguments.diff and (arguments.arrivals or arguments.spills):
        parser.error("--diff: expected without --arrivals and --spills")
    try:
        if arguments.resources:
            return 0 if report_resources(arguments.files, arguments.kernel, arguments.shared) else 1
        if arguments.arrivals:
            more = spills_line if arguments.spills else None
            return 0 if sass_arrivals.report_arrivals(arguments.files, arguments.kernel, more) else 1
        if arguments.spills:
            return 0 if report_spills(arguments.files, arguments.kernel) else 1
        loaded = [
            {name: kernel for name, kernel in load(file).items() if arguments.kernel in name}
            for file in arguments.files
        ]
        if not any(loaded):
            raise sass.SassError(f'no kernel with "{arguments.kernel}" in its name')
    except sass.SassError as error:
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
