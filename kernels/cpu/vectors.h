// Vectors of W floats: loads and stores of float32 and bfloat16, exp, activations, sums.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define AMX
#endif

#ifdef __AVX512F__
enum { W = 16 };  // floats of a vector
#else
enum { W = 8 };
#endif
typedef float vec __attribute__((vector_size(4 * W)));
typedef float unaligned __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * W)));
struct bf16 { uint16_t bits; };

static inline float load(float value) { return value; }
static inline float load(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
static inline void store(float *place, float value) { *place = value; }
static inline void store(bf16 *place, float value) {  // to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &value, 4);
    place->bits = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline vec splat(float value) { return vec{} + value; }

static inline vec load_vec(const float *from) { return *(const unaligned *)from; }
static inline vec load_vec(const bf16 *from) {
    hvec bits;
    memcpy(&bits, from, sizeof bits);
    uvec wide = __builtin_convertvector(bits, uvec) << 16;
    return (vec)wide;
}
static inline void store_vec(float *place, vec value) { *(unaligned *)place = value; }
static inline void store_vec(bf16 *place, vec value) {
    uvec bits = (uvec)value;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    hvec narrow = __builtin_convertvector(value != value ? (ivec)(uvec{} + 0x7fc0) : (ivec)rounded, hvec);
    memcpy(place, &narrow, sizeof narrow);
}
template <class T> static inline vec load_vec(const T *from, long count) {  // zeros from `count` on
    if (count >= W) return load_vec(from);
    vec out = {};
    for (long i = 0; i < count; i++) out[i] = load(from[i]);
    return out;
}
template <class T> static inline void store_vec(T *place, vec value, long count) {
    if (count >= W) store_vec(place, value);
    else for (long i = 0; i < count; i++) store(place + i, value[i]);
}

static inline vec exp_vec(vec x) {  // relative error below 2e-7; the argument is kept within what float32 can hold
    x = x > 88.0f ? splat(88.0f) : x;
    x = x < -87.0f ? splat(-87.0f) : x;
    const vec magic = splat(12582912.0f);  // 1.5 · 2²³: adding it rounds to an integer
    vec n = (x * 1.44269504f + magic) - magic;
    vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    vec scale;
    memcpy(&scale, &power, sizeof scale);
    return y * scale;
}

// The activation of number `act`: SiLU, the tanh GELU, or the exact GELU, whose error function is formula 7.1.26 of
// Abramowitz and Stegun, Handbook of Mathematical Functions (absolute error below 1.5e-7).
static inline vec activated(vec x, long act) {
    if (act == 2) {
        vec z = 0.70710678f * (x < 0 ? -x : x), t = 1.0f / (1.0f + 0.3275911f * z);
        vec y = splat(1.061405429f);
        y = y * t - 1.453152027f;
        y = y * t + 1.421413741f;
        y = y * t - 0.284496736f;
        y = y * t + 0.254829592f;
        y = 0.5f * y * t * exp_vec(-z * z);  // (1 − erf(z)) / 2
        return x * (x < 0 ? y : 1.0f - y);
    }
    vec argument = act ? 1.5957691216057308f * (x + 0.044715f * (x * x * x)) : x;
    return x / (1.0f + exp_vec(-argument));
}

static float sum_of(const float *x, long width) {
    vec sums = {};
    for (long i = 0; i < width; i += W) sums += load_vec(x + i, width - i);
    float total = 0;
    for (int l = 0; l < W; l++) total += sums[l];
    return total;
}

static float sum_of_squares(const float *x, long width) {
    vec sums = {};
    long i = 0;
    for (; i + W <= width; i += W) { vec a = load_vec(x + i); sums += a * a; }
    if (i < width) { vec a = load_vec(x + i, width - i); sums += a * a; }
    float total = 0;
    for (int l = 0; l < W; l++) total += sums[l];
    return total;
}

static inline float inverse_rms(const float *x, long width, float eps) {
    return 1.0f / __builtin_sqrtf(sum_of_squares(x, width) / width + eps);
}
