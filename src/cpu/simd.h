// Which Highway targets the CPU kernels are compiled for. Included before hwy/foreach_target.h.
//
// Kept: AVX-512 (AVX3), AVX2, NEON and the compiler's baseline. The others would add compile time and no speed: the
// kernels use plain fp32 arithmetic, which the finer AVX-512 and AES variants do not change, and the tile stages hold
// arrays of vectors, which scalable (SVE, RVV) vectors do not allow.
#pragma once

// Where there is neither, the scalar target, as GCC before 12.3 has it: an emulation of vectors, which Highway would
// take with other compilers, is one more target to test and takes twice as long to compile.
#undef HWY_BROKEN_EMU128
#define HWY_BROKEN_EMU128 1

#include <hwy/detect_targets.h>

// Whether the target being compiled is NEON of 64-bit Arm. Read where HWY_TARGET has its value.
#define DSPATTN_TARGET_IS_NEON (HWY_ARCH_ARM_A64 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128)

// Whether the target being compiled converts fp16 by instruction. Highway's emulation on the others (scalar code, SSE2
// and whatever it adds) loses infinity and NaN and cuts instead of rounding: there the kernels convert by themselves.
// Read where HWY_TARGET has its value.
#if defined(HWY_DISABLE_F16C)
#define DSPATTN_CONVERTS_F16 0
#else
#define DSPATTN_CONVERTS_F16 (HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || DSPATTN_TARGET_IS_NEON)
#endif

#if defined(HWY_AVX3_ZEN4)
#define DSPATTN_SKIP_ZEN4 HWY_AVX3_ZEN4
#else
#define DSPATTN_SKIP_ZEN4 0
#endif
#if defined(HWY_AVX3_SPR)
#define DSPATTN_SKIP_SPR HWY_AVX3_SPR
#else
#define DSPATTN_SKIP_SPR 0
#endif

// Sanitized builds leave out what their machine cannot run (src/cpu/CMakeLists.txt).
#if defined(DSPATTN_WITHOUT_AVX3)
#define DSPATTN_SKIP_AVX3 HWY_AVX3
#else
#define DSPATTN_SKIP_AVX3 0
#endif

#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS                                                                                 \
  (DSPATTN_SKIP_AVX3 | HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | DSPATTN_SKIP_ZEN4 | DSPATTN_SKIP_SPR | HWY_SVE | \
   HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
