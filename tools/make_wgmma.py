#!/usr/bin/env python3
# ruff: noqa: B023, E501  (every lambda is called before its loop moves on; a line of PTX stays one line)
"""Writes src/cuda/ptx/wgmma_shapes.h: one function per wgmma shape the fused kernels issue.

The instructions name every accumulator register, so their text is mechanical; this script is its source.
    python3 tools/make_wgmma.py > src/cuda/ptx/wgmma_shapes.h
    python3 tools/make_wgmma.py tf32 > src/cuda/ptx/wgmma_tf32_shapes.h
    python3 tools/make_wgmma.py stored > src/cuda/ptx/wgmma_stored_shapes.h
"""

import re
import sys
from pathlib import Path

SCORE_WIDTHS = (64, 128)  # keys per tile
HEAD_DIMS = (Path(__file__).parent.parent / "src/cuda/tile/head_dims.h").read_text(encoding="utf-8")


def head_dims(name):
    return tuple(map(int, re.findall(r"\d+", re.search(rf" {name}\[\] = \{{(.*)\}}", HEAD_DIMS)[1])))


# Where a product adds up the weights (products16.h): with the columns of V, and beside it.
SUM_WIDTHS = (72, 8)
VALUE_WIDTHS = tuple(sorted({*head_dims("kHeadDims"), *SUM_WIDTHS}))
STORED_WIDTH = 64  # columns of V where the sparse A lies in shared memory: the pipeline's pv_sparse
STORED_WIDTHS = (32, 64, 128)  # of the backward's products whose operands all lie in shared memory
GRADIENT_WIDTHS = head_dims("kBackwardHeadDims")  # and of those with one in registers
TF32_SCORE_WIDTHS = (32, 64)
TYPES = (("DType::bf16", "bf16"), ("DType::f16", "f16"))


def registers(count):
    return ", ".join(f"%{i}" for i in range(count))


def accumulators(count, mode="+"):
    return ", ".join(f'"{mode}f"(d[{i}])' for i in range(count))


def function(signature, text, count, inputs, mode="+"):
    """One overload; `text` maps an element type's PTX name to the instruction."""
    lines = [signature + " {"]
    for index, (dtype, ptx) in enumerate(TYPES):
        head = f"  if constexpr (kType == {dtype}) {{" if index == 0 else "  } else {"
        lines += [
            head,
            f'    asm volatile("{text(ptx)}"',
            f"                 : {accumulators(count, mode)}",
            f"                 : {inputs});",
        ]
    return "\n".join([*lines, "  }", "}", ""])


def main():
    print(
        "// Written by tools/make_wgmma.py: wgmma, one function per shape. Accumulator block j of a lane holds columns"
    )
    print("// 8j + 2t + {0,1} of rows g (d[4j], d[4j+1]) and g + 8 (d[4j+2], d[4j+3]); g = lane / 4, t = lane % 4.")
    print("// `accumulate` 0 overwrites d. Descriptors: see wgmma.h.")
    print('#pragma once\n\n#include <cstdint>\n\n#include "dspattn/dtype.h"\n')
    print("namespace dspattn::cuda::ptx {\n\n// clang-format off")
    for n in SCORE_WIDTHS:
        c = n // 2
        # The first step overwrites d: as pure outputs its registers are free until then.
        for mode, name, flag in (("=", "wgmma_dense_first", "0"), ("+", "wgmma_dense", "1")):
            print(
                f"// scores: d[64 x {n}] {mode.strip()}= A[64 x 16] B[16 x {n}], A in registers, B K-major in shared memory"
            )
            print("template <DType kType>")
            print(
                function(
                    f"__device__ __forceinline__ void {name}(float (&d)[{c}], const std::uint32_t (&a)[4], std::uint64_t b)",
                    lambda t: (
                        f"{{.reg .pred p; setp.ne.b32 p, {flag}, 0; "
                        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{t}.{t} "
                        f"{{{registers(c)}}}, {{%{c}, %{c + 1}, %{c + 2}, %{c + 3}}}, %{c + 4}, p, 1, 1, 0;}}"
                    ),
                    c,
                    '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)',
                    mode,
                )
            )
            print("// the same with A in shared memory")
            print("template <DType kType>")
            print(
                function(
                    f"__device__ __forceinline__ void {name}(float (&d)[{c}], std::uint64_t a, std::uint64_t b)",
                    lambda t: (
                        f"{{.reg .pred p; setp.ne.b32 p, {flag}, 0; "
                        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{t}.{t} "
                        f"{{{registers(c)}}}, %{c}, %{c + 1}, p, 1, 1, 0, 0;}}"
                    ),
                    c,
                    '"l"(a), "l"(b)',
                    mode,
                )
            )
    for n in VALUE_WIDTHS:
        c = n // 2
        print(
            f"// values: d[64 x {n}] (+)= sparse A[64 x 32] B[32 x {n}], A's kept values in registers, B row-major (MN-major)"
        )
        print("template <DType kType, int kMetadataPair>")
        print(
            function(
                f"__device__ __forceinline__ void wgmma_sparse(float (&d)[{c}], std::uint32_t a0, std::uint32_t a1, "
                f"std::uint32_t a2, std::uint32_t a3, std::uint64_t b, std::uint32_t metadata, int accumulate)",
                lambda t: (
                    f"{{.reg .pred p; setp.ne.b32 p, %{c + 6}, 0; wgmma.mma_async.sp.sync.aligned.m64n{n}k32.f32.{t}.{t} "
                    f"{{{registers(c)}}}, {{%{c}, %{c + 1}, %{c + 2}, %{c + 3}}}, %{c + 4}, %{c + 5}, %{c + 7}, p, 1, 1, 1;}}"
                ),
                c,
                '"r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(metadata), "r"(accumulate), "n"(kMetadataPair)',
            )
        )
    c = STORED_WIDTH // 2
    print(f"// the same for {STORED_WIDTH} columns with A's kept values in shared memory")
    print("template <DType kType>")
    print(
        function(
            f"__device__ __forceinline__ void wgmma_sparse_stored(float (&d)[{c}], std::uint64_t a, std::uint64_t b, "
            f"std::uint32_t metadata)",
            lambda t: (
                f"{{.reg .pred p; setp.ne.b32 p, 1, 0; "
                f"wgmma.mma_async.sp.sync.aligned.m64n{STORED_WIDTH}k32.f32.{t}.{t} "
                f"{{{registers(c)}}}, %{c}, %{c + 1}, %{c + 2}, 0, p, 1, 1, 0, 1;}}"
            ),
            c,
            '"l"(a), "l"(b), "r"(metadata)',
        )
    )
    print("// clang-format on\n\n}  // namespace dspattn::cuda::ptx")


def tf32_function(signature, text, count, inputs, mode="+"):
    print(
        f'__device__ __forceinline__ void {signature} {{\n  asm volatile("{text}"\n'
        f"               : {accumulators(count, mode)}\n               : {inputs});\n}}\n"
    )


def main_tf32():
    """Both operands K-major, which is all that tf32 takes; a step is 8 elements, 16 of a sparse A."""
    print(
        "// Written by tools/make_wgmma.py: wgmma on tf32, one function per shape. Accumulators as in wgmma_shapes.h."
    )
    print("// B is K-major in shared memory; of every operand the tensor core reads the upper 19 bits of each word.")
    print("#pragma once\n\n#include <cstdint>\n\nnamespace dspattn::cuda::ptx {\n\n// clang-format off")
    four = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])'
    for n in TF32_SCORE_WIDTHS:
        c = n // 2
        for mode, name, flag, sign in (("=", "wgmma_tf32_first", "0", "="), ("+", "wgmma_tf32", "1", "+=")):
            instruction = (
                f"{{.reg .pred p; setp.ne.b32 p, {flag}, 0; wgmma.mma_async.sync.aligned.m64n{n}k8.f32.tf32.tf32 "
                f"{{{registers(c)}}}, "
            )
            print(f"// scores: d[64 x {n}] {sign} A[64 x 8] B[8 x {n}], A in registers")
            tf32_function(
                f"{name}(float (&d)[{c}], const std::uint32_t (&a)[4], std::uint64_t b)",
                f"{instruction}{{%{c}, %{c + 1}, %{c + 2}, %{c + 3}}}, %{c + 4}, p, 1, 1;}}",
                c,
                f'{four}, "l"(b)',
                mode,
            )
            print("// the same with A in shared memory")
            tf32_function(
                f"{name}(float (&d)[{c}], std::uint64_t a, std::uint64_t b)",
                f"{instruction}%{c}, %{c + 1}, p, 1, 1;}}",
                c,
                '"l"(a), "l"(b)',
                mode,
            )
    for n in VALUE_WIDTHS:
        c = n // 2
        print(f"// values: d[64 x {n}] (+)= sparse A[64 x 16] B[16 x {n}], A's kept values in registers")
        print("template <int kMetadataPair>")
        tf32_function(
            f"wgmma_tf32_sparse(float (&d)[{c}], const std::uint32_t* a, std::uint64_t b, std::uint32_t metadata, "
            f"int accumulate)",
            f"{{.reg .pred p; setp.ne.b32 p, %{c + 6}, 0; wgmma.mma_async.sp.sync.aligned.m64n{n}k16.f32.tf32.tf32 "
            f"{{{registers(c)}}}, {{%{c}, %{c + 1}, %{c + 2}, %{c + 3}}}, %{c + 4}, %{c + 5}, %{c + 7}, p, 1, 1;}}",
            c,
            f'{four}, "l"(b), "r"(metadata), "r"(accumulate), "n"(kMetadataPair)',
        )
    c = STORED_WIDTH // 2
    print(f"// the same for {STORED_WIDTH} columns with A's kept values in shared memory")
    tf32_function(
        f"wgmma_tf32_sparse_stored(float (&d)[{c}], std::uint64_t a, std::uint64_t b, std::uint32_t metadata)",
        f"{{.reg .pred p; setp.ne.b32 p, 1, 0; "
        f"wgmma.mma_async.sp.sync.aligned.m64n{STORED_WIDTH}k16.f32.tf32.tf32 "
        f"{{{registers(c)}}}, %{c}, %{c + 1}, %{c + 2}, 0, p, 1, 1;}}",
        c,
        '"l"(a), "l"(b), "r"(metadata)',
    )
    print("// clang-format on\n\n}  // namespace dspattn::cuda::ptx")


def main_stored():
    """The backward's: dense, an operand in shared memory is either K-major or by rows of the depth (MN-major)."""
    print("// Written by tools/make_wgmma.py: dense wgmma with both operands in shared memory, or A in registers.")
    print(
        "// Accumulators as in wgmma_shapes.h. A stored operand is K-major, or, where its flag is 1, stored by rows of"
    )
    print("// the depth (MN-major).")
    print('#pragma once\n\n#include <cstdint>\n\n#include "dspattn/dtype.h"\n')
    print("namespace dspattn::cuda::ptx {\n\n// clang-format off")
    for n in STORED_WIDTHS:
        c = n // 2
        for mode, name, flag, sign in (("=", "wgmma_stored_first", "0", "="), ("+", "wgmma_stored", "1", "+=")):
            print(f"// d[64 x {n}] {sign} A[64 x 16] B[16 x {n}]")
            print("template <DType kType, int kDepthRowsA, int kDepthRowsB>")
            print(
                function(
                    f"__device__ __forceinline__ void {name}(float (&d)[{c}], std::uint64_t a, std::uint64_t b)",
                    lambda t: (
                        f"{{.reg .pred p; setp.ne.b32 p, {flag}, 0; "
                        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{t}.{t} "
                        f"{{{registers(c)}}}, %{c}, %{c + 1}, p, 1, 1, %{c + 2}, %{c + 3};}}"
                    ),
                    c,
                    '"l"(a), "l"(b), "n"(kDepthRowsA), "n"(kDepthRowsB)',
                    mode,
                )
            )
    for n in GRADIENT_WIDTHS:
        c = n // 2
        print(f"// d[64 x {n}] += A[64 x 16] B[16 x {n}], A in registers, B stored by rows of the depth")
        print("template <DType kType>")
        print(
            function(
                f"__device__ __forceinline__ void wgmma_gradient(float (&d)[{c}], const std::uint32_t* a, std::uint64_t b)",
                lambda t: (
                    f"{{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{t}.{t} "
                    f"{{{registers(c)}}}, {{%{c}, %{c + 1}, %{c + 2}, %{c + 3}}}, %{c + 4}, p, 1, 1, 1;}}"
                ),
                c,
                '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)',
            )
        )
        print("// the same with A K-major in shared memory; `accumulate` 0 overwrites d")
        print("template <DType kType>")
        print(
            function(
                f"__device__ __forceinline__ void wgmma_gradient_stored(float (&d)[{c}], std::uint64_t a, std::uint64_t b, "
                f"int accumulate)",
                lambda t: (
                    f"{{.reg .pred p; setp.ne.b32 p, %{c + 2}, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{t}.{t} "
                    f"{{{registers(c)}}}, %{c}, %{c + 1}, p, 1, 1, 0, 1;}}"
                ),
                c,
                '"l"(a), "l"(b), "r"(accumulate)',
            )
        )
    print("// clang-format on\n\n}  // namespace dspattn::cuda::ptx")


if __name__ == "__main__":
    {"tf32": main_tf32, "stored": main_stored}.get("".join(sys.argv[1:]), main)()
