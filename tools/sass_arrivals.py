"""Finds the arrivals at barriers that may overtake loads from shared memory. sass_report.py, whose --arrivals this is,
says what that means and which loads count."""

import collections
import concurrent.futures

import sass

SHOWN_LOADS = 4  # of an arrival


def returns_of(blocks, edges):
    """The edges from the end of a called function to behind its calls."""
    result = collections.defaultdict(set)
    for block in blocks.values():
        call = block[-1]
        if call.base == "CALL" and call.target in blocks:
            behind = edges[block[0].address] - {call.target}
            for node in sass.reachable(call.target, edges):
                if blocks[node][-1].base == "RET":
                    result[node] |= behind
    return result


def pass_block(block, pending, arrivals=None):
    """What is on its way behind a block, of what was before it; notes what is so at each arrival.

    pending: {load: scoreboards}, a wait on any of which shows that the load has returned. Loads return in order, so a
    later load's scoreboard shows it too; the compiler relies on it and gives many loads no scoreboard of their own.
    """
    for instruction in block:
        if pending and (waits := instruction.waits):
            pending = {load: mask for load, mask in pending.items() if not mask & waits}
        if arrivals is not None and instruction.arrives:
            arrivals[instruction.address] = sorted(pending)
        if instruction.loads_shared:
            own = 1 << instruction.scoreboard if instruction.scoreboard != sass.NO_SCOREBOARD else 0
            if instruction.guard is None:  # one that does not run counts on no scoreboard
                pending = {load: mask | own for load, mask in pending.items()}
            pending = {**pending, instruction.address: own}
    return pending


def overtaking_arrivals(instructions):
    """[(arrival, loads)]: the loads by lanes that may be on their way at the arrival on some way to it."""
    if not any(instruction.arrives for instruction in instructions):
        return []
    at = {instruction.address: instruction for instruction in instructions}
    blocks, edges = sass.blocks_of(instructions)
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


def arrivals_report(text, wanted="", more=None):
    """(lines, arrivals that may overtake a load, arrivals, others) of what cuobjdump -sass prints, kernel by kernel.
    Others: kernels of which more(name, instructions) says something."""
    lines, overtaking, arrivals, others = [], 0, 0, 0
    for part in text.split(sass.ARCHITECTURE):  # a file may hold a kernel for several
        if "ARRIVE" not in part and more is None:
            continue
        for name, instructions in sorted(sass.parse_sass(part).items(), key=lambda item: sass.short_name(item[0])):
            if wanted not in sass.short_name(name):
                continue
            found = overtaking_arrivals(instructions)
            overtaking += len(found)
            arrivals += sum(instruction.arrives for instruction in instructions)
            if found:
                lines.append(f"{sass.short_name(name)}: {len(found)} arrivals may overtake loads from shared memory")
            for arrival, loads in found:
                lines.append(f"  {arrival} may overtake {len(loads)}:")
                lines += [f"    {load}" for load in loads[:SHOWN_LOADS]]
                if len(loads) > SHOWN_LOADS:
                    lines.append(f"    and {len(loads) - SHOWN_LOADS} more")
            if more is not None and (line := more(sass.short_name(name), instructions)):
                lines.append(line)
                others += 1
    return lines, overtaking, arrivals, others


def report_arrivals(files, wanted, more=None):
    """Prints the findings of all files; whether there are none."""
    totals = (0, 0, 0)

    def disassembled(file):
        return sass.cuobjdump("-arch", "sm_90", "-sass", file)  # and sm_90a: the fault is Hopper's

    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # the next file is disassembled meanwhile
        for file, text in zip(files, pool.map(disassembled, files), strict=True):
            if not sass.FUNCTION.search(text):
                raise sass.SassError(f"{file}: no machine code for Hopper in it")
            lines, *counts = arrivals_report(text, wanted, more)
            totals = tuple(map(sum, zip(totals, counts, strict=True)))
            if lines:
                print("\n".join([f"=== {file}", *lines]))
    overtaking, arrivals, others = totals
    if not arrivals:
        raise sass.SassError("no arrival in any kernel: nothing was checked")
    print(f"{overtaking} of {arrivals} arrivals may overtake loads from shared memory")
    if more is not None:
        print(f"{others} kernels spill registers in loops with products")
    return not overtaking + others
