import torch
from bench.decode.cells import Cell
from bench.decode import measure as m
for c in (Cell("one", 1, 32, 8, 1, 2048, 64), Cell("shared", 16, 32, 8, 1, 8192, 128, choice="shared"), Cell("several", 16, 32, 32, 16, 8192, 64), Cell("paged", 16, 32, 32, 1, 8192, 64, lengths=True, page=64), Cell("one", 1, 32, 8, 1, 8192, 128), Cell("small", 1, 12, 12, 512, 512, 64)):
    sets = m.inputs_of(c)[:1]
    for call in [m.native.prepare(*sets[0], choice=c.choice, kernel=f"decode_bf16_d{c.d}")[0]] if c.part == "small" else m.ours_of(c, sets, "2:4", None):
        call(); torch.cuda.synchronize()
