"""The parts of bench.forward.rest_windows that need no GPU."""

from bench.forward import rest_windows

PREFIX = "void dspattn::cuda::blocks::(anonymous namespace)::"


def figures(us):
    return {"median_us": us, "spread_us": 0.0, "tflops": 1e3 / us}


def test_cells_are_those_asked_for():
    assert rest_windows.cells([101, 0], {"d": "128"}) == [(101, 128), (0, 128)]
    assert len(rest_windows.cells(rest_windows.WINDOWS, {})) == 2 * len(rest_windows.WINDOWS)


def test_keys_that_queries_see():
    for n, window in ((7, 3), (7, 7), (7, 0), (7, 100), (7, 1)):
        seen = sum(min(i + 1, window or n) for i in range(n))
        assert rest_windows.seen_keys(n, window) == seen


def test_kernels_before_the_forward():
    kernels = [
        (PREFIX + "plain_prefix_means<(dspattn::DType)2, 64>(dspattn::cuda::blocks::MeansParams)", 10.0, 33.0),
        (PREFIX + "block_means(dspattn::cuda::blocks::MeansParams, int)", 12.0, 37.5),
        ("void dspattn::cuda::sm90::forward<Config>(dspattn::cuda::blocks::MeansView)", 30.0, 500.0),
    ]
    before, each = rest_windows.before_forward(kernels)
    assert (before, each) == (27.5, {"plain_prefix_means": 23.0, "block_means": 25.5})
    assert rest_windows.before_forward(kernels[2:]) == (0.0, {})
    assert rest_windows.medians([(before, each)] * 3) == {"before_us": 27.5, "kernels_us": each}


def test_rows_stand_beside_drop_and_the_first_library():
    timed = {
        ("2:4", "drop", "old"): figures(90), ("2:4", "drop", "new"): figures(90),
        ("2:4", "mean", "old"): figures(200), ("2:4", "mean", "new"): figures(100),
    }  # fmt: skip
    profiled = {("2:4", "mean", "new"): {"before_us": 27.5, "kernels_us": {"row_means": 27.5}}}
    rows = rest_windows.rows_of((101, 64), ["2:4"], ["old", "new"], timed, profiled)
    assert [row["ratio"] for row in rows] == [{}, {"old": 1.0}, {"drop": 0.45}, {"drop": 0.9, "old": 2.0}]
    assert rows[3]["window"] == 101 and rows[3]["library"] == "new"
    assert "27.5 us before (row_means 27.5)" in rest_windows.line_of(rows[3])
