// FANFOLD_VECTORIZED compiles a function twice, for any x86-64 and for AVX2; the loader chooses one
// when the library loads. Neither variant contracts to fused multiply-add, so both give the same
// bits. Sanitizers cannot run the resolver.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(FANFOLD_SANITIZED)
#define FANFOLD_VECTORIZED __attribute__((target_clones("avx2", "default")))
#else
#define FANFOLD_VECTORIZED
#endif
