// What stands between the products of a decoder layer, for a few rows on a CPU: kernels/cpu.py compiles and calls it.
//
// Every function computes each row by itself: the order of its sums depends on the row's own values, on the width, and
// in attention on the positions of its keys, but neither on the number of rows nor on the slots where keys lie. So a
// drafted token gets the bits that plain decoding gives it. Arithmetic is in float32, and each result is rounded once.

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

// `out`: the RMSNorm of the new x, or with `shift`, the bias of a LayerNorm, its LayerNorm; without `weight` neither.
template <class T>
static void add_norm(T *x, const T *y, const T *bias, const float *after, float after_eps, float factor,
                     const float *weight, const float *shift, float eps, T *out, long rows, long width, long x_row,
                     long y_row, long out_row) {
    #pragma omp parallel for if (rows * width > 65536)
    for (long row = 0; row < rows; row++) {
        float own[width];
        T *at = x + row * x_row;
        for (long i = 0; i < width; i += W) store_vec(own + i, load_vec(at + i, width - i), width - i);
        if (y) {
            float branch[width];
            const T *from = y + row * y_row;
            for (long i = 0; i < width; i += W) {
                vec value = load_vec(from + i, width - i);
                if (bias) value += load_vec(bias + i, width - i);
                store_vec(branch + i, value, width - i);
            }
            if (after) {
                float scale = inverse_rms(branch, width, after_eps);
                for (long i = 0; i < width; i++) branch[i] = branch[i] * scale * after[i];
            }
            for (long i = 0; i < width; i += W) {
                long many = width - i;
                store_vec(at + i, load_vec(own + i, many) + factor * load_vec(branch + i, many), many);
                store_vec(own + i, load_vec(at + i, many), many);
            }
        }
        if (!weight) continue;
        if (shift) {
            float mean = sum_of(own, width) / width;
            for (long i = 0; i < width; i++) own[i] -= mean;
        }
        float scale = inverse_rms(own, width, eps);
        for (long i = 0; i < width; i += W) {
            vec value = load_vec(own + i, width - i) * scale * load_vec(weight + i, width - i);
            if (shift) value += load_vec(shift + i, width - i);
            store_vec(out + row * out_row + i, value, width - i);
        }
    }
}

template <class T>
static void gated(const T *gate_up, T *out, const T *bias, long act, bool has_gate, long rows, long width,
                  long row_stride, long out_row) {
    #pragma omp parallel for if (rows * width > 16384)
    for (long row = 0; row < rows; row++) {
        const T *gates = gate_up + row * row_stride, *ups = gates + width;
        for (long i = 0; i < width; i += W) {
            vec gate = load_vec(gates + i, width - i), up = has_gate ? load_vec(ups + i, width - i) : splat(1);
            if (bias) {
                gate += load_vec(bias + i, width - i);
                if (has_gate) up += load_vec(bias + width + i, width - i);
            }
            store_vec(out + row * out_row + i, activated(gate, act) * up, width - i);
        }
    }
}

// The first `rotated` dimensions of each head of q and k are rotated. `interleaved`: q, k and v of a head lie together.
template <class T>
static void rotate_write(const T *qkv, const T *table, const int64_t *positions, const int64_t *slots, T *cache,
                         T *q_out, const T *bias, const float *norm, float eps, long rows, long count, long heads,
                         long kv_heads, long width, long qkv_row, long table_row, long positions_batch,
                         long positions_node, long slots_batch, long slots_node, long cache_batch, long cache_slot,
                         long cache_kind, long cache_head, long norm_head, long rotated, bool interleaved) {
    long half = rotated / 2;
    for (long row = 0; row < rows * count; row++) {
        long batch = row / count, node = row % count;
        const T *angle = table + positions[batch * positions_batch + node * positions_node] * table_row;
        T *stored = cache + batch * cache_batch + slots[batch * slots_batch + node * slots_node] * cache_slot;
        for (long head = 0; head < heads + 2 * kv_heads; head++) {
            float z[width];
            long place = (interleaved ? head % heads * 3 + head / heads : head) * width;
            const T *from = qkv + row * qkv_row + place;
            for (long i = 0; i < width; i += W) {
                vec value = load_vec(from + i, width - i);
                if (bias) value += load_vec(bias + place + i, width - i);
                store_vec(z + i, value, width - i);
            }
            bool is_value = head >= heads + kv_heads;
            if (norm && !is_value) {
                float scale = inverse_rms(z, width, eps);
                for (long i = 0; i < width; i++) z[i] = z[i] * scale * norm[head * norm_head + i];
            }
            T *to = q_out + row * heads * width + head * width;
            if (head >= heads) to = stored + is_value * cache_kind + (head - heads) % kv_heads * cache_head;
            if (is_value) {
                for (long i = 0; i < width; i += W) store_vec(to + i, load_vec(z + i, width - i), width - i);
                continue;
            }
            for (long i = 0; i < half; i += W) {
                long many = half - i;
                vec first = load_vec(z + i, many), second = load_vec(z + half + i, many);
                vec cos = load_vec(angle + i, many), sin = load_vec(angle + rotated + i, many);
                store_vec(to + i, first * cos + second * sin, many);
                cos = load_vec(angle + half + i, many);
                sin = load_vec(angle + rotated + half + i, many);
                store_vec(to + half + i, second * cos + first * sin, many);
            }
            for (long i = rotated; i < width; i += W) store_vec(to + i, load_vec(z + i, width - i), width - i);
        }
    }
}

// Attention. A task is W lanes of one row of the batch and key/value head: (query, head of the group). Lanes hold
// scores [keys, W]; each lane adds up its own keys in the order of their slots, which along a path of the tree is the
// order of their positions. A key that a lane does not see adds an exact zero.
enum { LANES = W, KEYS = 64 };

template <int MANY> static inline void score_keys(const float *queries, const float *keys, long stride, long padded, float *scores) {
    vec sums[MANY] = {};
    for (long d = 0; d < padded; d++) {
        vec q = load_vec(queries + d * LANES);
        #pragma GCC unroll 8
        for (int i = 0; i < MANY; i++) sums[i] += q * keys[i * stride + d];
    }
    #pragma GCC unroll 8
    for (int i = 0; i < MANY; i++) store_vec(scores + i * LANES, sums[i]);
}

template <int MANY, int PARTS>
static inline void add_values(const float *weights, const float *values, long stride, long count, long padded, float *out) {
    vec sums[MANY][PARTS];  // weights [keys, W], values [keys, W · PARTS], out [MANY, W · PARTS]
    #pragma GCC unroll 4
    for (int r = 0; r < MANY; r++) {
        #pragma GCC unroll 4
        for (int c = 0; c < PARTS; c++) sums[r][c] = load_vec(out + r * padded + c * W);
    }
    for (long key = 0; key < count; key++, values += stride, weights += LANES) {
        vec value[PARTS];
        #pragma GCC unroll 4
        for (int c = 0; c < PARTS; c++) value[c] = load_vec(values + c * W);
        #pragma GCC unroll 4
        for (int r = 0; r < MANY; r++) {
            #pragma GCC unroll 4
            for (int c = 0; c < PARTS; c++) sums[r][c] += weights[r] * value[c];
        }
    }
    #pragma GCC unroll 4
    for (int r = 0; r < MANY; r++) {
        #pragma GCC unroll 4
        for (int c = 0; c < PARTS; c++) store_vec(out + r * padded + c * W, sums[r][c]);
    }
}

template <int MANY>
static inline void add_values(const float *weights, const float *values, long stride, long count, long padded, float *out) {
    long d = 0;
    for (; d + 4 * W <= padded; d += 4 * W) add_values<MANY, 4>(weights, values + d, stride, count, padded, out + d);
    for (; d < padded; d += W) add_values<MANY, 1>(weights, values + d, stride, count, padded, out + d);
}

// `count` keys or values from slot `first` on as float32 rows of `padded`: where they lie, or in `copy`.
static const float *rows_of(const float *from, long first, long count, long width, long padded, long stride, float *copy, long *step) {
    if (width == padded) { *step = stride; return from + first * stride; }
    for (long i = 0; i < count; i++) for (long d = 0; d < padded; d++) copy[i * padded + d] = d < width ? from[(first + i) * stride + d] : 0;
    *step = padded;
    return copy;
}
static const float *rows_of(const bf16 *from, long first, long count, long width, long padded, long stride, float *copy, long *step) {
    for (long i = 0; i < count; i++) {
        const bf16 *row = from + (first + i) * stride;
        for (long d = 0; d < width; d += W) store_vec(copy + i * padded + d, load_vec(row + d, width - d));
    }
    *step = padded;
    return copy;
}

struct Shape {
    long rows, queries, tree_keys, heads, kv_heads, width, window;
    long q_batch, q_head, q_query, k_batch, k_head, k_slot, v_batch, v_head, v_slot, out_batch, out_head, out_query;
    long ancestors_batch, ancestors_query, depth_batch, key_depth_batch;
};

template <class T>
static void attend(const T *q, const T *k, const T *v, const int64_t *lengths, const int64_t *ancestors, const int32_t *depth,
                   const int32_t *key_depth, T *out, const Shape *s, float scale, float softcap) {
    const float none = -__builtin_inff();
    long group = s->heads / s->kv_heads, blocks = (s->queries * group + LANES - 1) / LANES;
    long padded = (s->width + W - 1) / W * W;
    #pragma omp parallel for schedule(dynamic)
    for (long task = 0; task < s->rows * s->kv_heads * blocks; task++) {
        long block = task % blocks, head = task / blocks % s->kv_heads, row = task / blocks / s->kv_heads;
        long prefix = lengths[row], keys = prefix + s->tree_keys, lanes = s->queries * group - block * LANES;
        if (lanes > LANES) lanes = LANES;
        const T *own_k = k + row * s->k_batch + head * s->k_head, *own_v = v + row * s->v_batch + head * s->v_head;
        float queries[padded * LANES], copy[KEYS * padded], sums[LANES * padded];
        memset(queries, 0, sizeof queries);
        memset(sums, 0, sizeof sums);
        const int64_t *seen_by[LANES];  // ancestors of each lane's query
        int32_t depths[LANES] = {};
        long from[LANES], first = prefix;  // the first slot that each lane sees, and any
        for (long lane = 0; lane < LANES; lane++) {
            long number = block * LANES + (lane < lanes ? lane : 0), query = number / group;
            const T *own = q + row * s->q_batch + (head * group + number % group) * s->q_head + query * s->q_query;
            if (lane < lanes) for (long d = 0; d < s->width; d++) queries[d * LANES + lane] = load(own[d]);
            seen_by[lane] = ancestors + row * s->ancestors_batch + query * s->ancestors_query;
            if (s->window) depths[lane] = depth[row * s->depth_batch + query];
            from[lane] = s->window ? prefix + depths[lane] - s->window + 1 : 0;
            if (from[lane] < 0) from[lane] = 0;
            if (from[lane] < first) first = from[lane];
        }
        float *scores = (float *)malloc((keys - first) * LANES * sizeof(float));
        vec best = splat(none);
        for (long start = first; start < keys; start += KEYS) {
            long count = keys - start < KEYS ? keys - start : KEYS, step, i = 0;
            const float *tile = rows_of(own_k, start, count, s->width, padded, s->k_slot, copy, &step);
            float *to = scores + (start - first) * LANES;
            for (; i + 8 <= count; i += 8) score_keys<8>(queries, tile + i * step, step, padded, to + i * LANES);
            for (; i < count; i++) score_keys<1>(queries, tile + i * step, step, padded, to + i * LANES);
            for (i = 0; i < count; i++) {
                vec x = load_vec(to + i * LANES) * scale;
                if (softcap) {
                    x = x / softcap;
                    vec x2 = x * x;  // near 0 by the series of tanh, where 1 − 2 / (e^2x + 1) would cancel
                    vec series = x * (1.0f + x2 * (-1.0f / 3 + x2 * (2.0f / 15 + x2 * (-17.0f / 315 + x2 * (62.0f / 2835)))));
                    x = softcap * (x2 < 0.0625f ? series : 1.0f - 2.0f / (exp_vec(x + x) + 1.0f));
                }
                long slot = start + i, node = slot - prefix;
                if (node >= 0) {
                    for (long lane = 0; lane < LANES; lane++) {
                        bool seen = seen_by[lane][node / 64] >> (node % 64) & 1;
                        if (s->window) seen = seen && depths[lane] - key_depth[row * s->key_depth_batch + node] < s->window;
                        if (!seen) x[lane] = none;
                    }
                } else if (s->window) {
                    for (long lane = 0; lane < LANES; lane++) if (slot < from[lane]) x[lane] = none;
                }
                store_vec(to + i * LANES, x);
                best = x > best ? x : best;
            }
        }
        vec total = {};
        best = best > none ? best : vec{};  // padding may see nothing
        for (long i = 0; i < keys - first; i++) {
            vec x = load_vec(scores + i * LANES);
            vec weight = x == none ? vec{} : exp_vec(x - best);  // a NaN stays one
            total += weight;
            store_vec(scores + i * LANES, weight);
        }
        for (long start = first; start < keys; start += KEYS) {
            long count = keys - start < KEYS ? keys - start : KEYS, step, lane = 0;
            const float *tile = rows_of(own_v, start, count, s->width, padded, s->v_slot, copy, &step);
            const float *weights = scores + (start - first) * LANES;
            for (; lane + 4 <= lanes; lane += 4) add_values<4>(weights + lane, tile, step, count, padded, sums + lane * padded);
            for (; lane < lanes; lane++) add_values<1>(weights + lane, tile, step, count, padded, sums + lane * padded);
        }
        free(scores);
        for (long lane = 0; lane < lanes; lane++) {
            long number = block * LANES + lane;
            T *to = out + row * s->out_batch + (head * group + number % group) * s->out_head + number / group * s->out_query;
            float share = total[lane] > 0 ? 1.0f / total[lane] : 0.0f;
            for (long d = 0; d < s->width; d++) store(to + d, sums[lane * padded + d] * share);
        }
    }
}

// Products: out = x weightᵀ + bias, weight [outputs, inputs] as PyTorch holds it. A number is the sum of W partial sums,
// each over every W-th input, whatever the number of rows. STEP inputs are read together: one vector of floats, or the
// even and the odd ones of 2 W in bfloat16, whose bits are the upper half of a float's. x is converted to rows of floats
// in that order.
template <class T> struct Line { enum { STEP = 4 * W / sizeof(T), VECTORS = STEP / W }; };
static inline void load_line(const float *from, vec *out) { out[0] = load_vec(from); }
static inline void load_line(const bf16 *from, vec *out) {
    uvec pairs;
    memcpy(&pairs, from, sizeof pairs);
    out[0] = (vec)(pairs << 16);
    out[1] = (vec)(pairs & 0xffff0000u);
}
template <class T> static inline void load_line(const T *from, long count, vec *out) {  // zeros from `count` on
    T end[Line<T>::STEP] = {};
    memcpy(end, from, count * sizeof(T));
    load_line(end, out);
}

static inline float total(vec sums) {
#ifdef __AVX512F__
    v8 half = *(const v8 *)&sums + *((const v8 *)&sums + 1);
#else
    v8 half = *(const v8 *)&sums;
#endif
    v4 quarter = *(const v4 *)&half + *((const v4 *)&half + 1);
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

#ifdef __AVX512F__  // as many sums as the registers hold
enum { ROWS = 4, OUTPUTS = 4 };
#else
enum { ROWS = 4, OUTPUTS = 2 };
#endif

// `ahead` lines of the weights after these are fetched in each step, from `next` on: the memory is then never idle.
template <class T, int R, int O>
static inline void product_block(const float *x, long x_row, const T *weight, const T *bias, long inputs, T *out, long out_row, const char *next, long ahead) {
    enum { STEP = Line<T>::STEP, VECTORS = Line<T>::VECTORS };
    vec sums[R][O] = {};
    long k = 0;
    for (; k + STEP <= inputs; k += STEP) {
        for (long i = 0; i < ahead; i++, next += 64) __builtin_prefetch(next);
        vec w[O][VECTORS];
        #pragma GCC unroll 4
        for (int o = 0; o < O; o++) load_line(weight + o * inputs + k, w[o]);
        #pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            #pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                vec own = load_vec(x + r * x_row + k + v * W);
                #pragma GCC unroll 4
                for (int o = 0; o < O; o++) sums[r][o] += own * w[o][v];
            }
        }
    }
    if (k < inputs) {
        for (int o = 0; o < O; o++) {
            vec w[VECTORS];
            load_line(weight + o * inputs + k, inputs - k, w);
            for (int r = 0; r < R; r++) for (int v = 0; v < VECTORS; v++) sums[r][o] += load_vec(x + r * x_row + k + v * W) * w[v];
        }
    }
    for (int r = 0; r < R; r++) for (int o = 0; o < O; o++) store(out + r * out_row + o, total(sums[r][o]) + (bias ? load(bias[o]) : 0));
}

#ifdef __AVX512BF16__
// In bfloat16 by the CPU's own product of pairs, twice as many in an instruction and without a conversion: lane l of the
// partial sums has inputs 2 l and 2 l + 1 of every 32. The instruction takes denormal numbers for zero.
#define PAIRS
template <class T, int R, int O>
static inline void product_block(const bf16 *x, long x_row, const bf16 *weight, const bf16 *bias, long inputs, bf16 *out, long out_row, const char *next, long ahead) {
    __m512 sums[R][O];
    for (int r = 0; r < R; r++) for (int o = 0; o < O; o++) sums[r][o] = _mm512_setzero_ps();
    long k = 0;
    for (; k + 32 <= inputs; k += 32) {
        for (long i = 0; i < ahead; i++, next += 64) __builtin_prefetch(next);
        __m512bh w[O];
        #pragma GCC unroll 4
        for (int o = 0; o < O; o++) w[o] = (__m512bh)_mm512_loadu_si512(weight + o * inputs + k);
        #pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            __m512bh own = (__m512bh)_mm512_loadu_si512(x + r * x_row + k);
            #pragma GCC unroll 4
            for (int o = 0; o < O; o++) sums[r][o] = _mm512_dpbf16_ps(sums[r][o], own, w[o]);
        }
    }
    if (k < inputs) {
        __mmask32 rest = (1u << (inputs - k)) - 1;
        for (int r = 0; r < R; r++) for (int o = 0; o < O; o++)
            sums[r][o] = _mm512_dpbf16_ps(sums[r][o], (__m512bh)_mm512_maskz_loadu_epi16(rest, x + r * x_row + k),
                                          (__m512bh)_mm512_maskz_loadu_epi16(rest, weight + o * inputs + k));
    }
    for (int r = 0; r < R; r++) for (int o = 0; o < O; o++) store(out + r * out_row + o, total((vec)sums[r][o]) + (bias ? load(bias[o]) : 0));
}
#endif

template <class T, int O, class X>
static inline void product_rows(const X *x, long x_row, const T *weight, const T *bias, long inputs, T *out, long out_row, long rows) {
    long left = rows % ROWS, groups = rows / ROWS + left / 2 + left % 2, ahead = (O + groups - 1) / groups, r = 0;
    const char *next = (const char *)(weight + O * inputs);
    for (; r + ROWS <= rows; r += ROWS, next += ahead * inputs * sizeof(T))
        product_block<T, ROWS, O>(x + r * x_row, x_row, weight, bias, inputs, out + r * out_row, out_row, next, ahead);
    for (; r + 2 <= rows; r += 2, next += ahead * inputs * sizeof(T))
        product_block<T, 2, O>(x + r * x_row, x_row, weight, bias, inputs, out + r * out_row, out_row, next, ahead);
    for (; r < rows; r++, next += ahead * inputs * sizeof(T))
        product_block<T, 1, O>(x + r * x_row, x_row, weight, bias, inputs, out + r * out_row, out_row, next, ahead);
}

#ifdef AMX
// Linux lends a process the tiles when it asks for them (ARCH_REQ_XCOMP_PERM).
static const bool has_tiles = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

struct Tiles { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; };

// Sums [16 outputs, 16 rows] of G groups of rows: tiles 0 to 3. A is a block of the weight as it lies in memory, 16 rows
// of 32 inputs; B is x, [16 pairs of inputs, 16 rows, 2]. Rows and inputs that do not exist are zeros.
template <int G>
static inline void product_tiles(const bf16 *weight, long stride, long outputs, const bf16 *x, long steps, long last, float *sums) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (long step = 0; step < steps; step++) {
        const bf16 *block = weight + step * 32, *own = x + step * 512;
        if (outputs < 16 || step == last) {
            bf16 part[16 * 32] = {};
            for (long o = 0; o < outputs; o++) memcpy(part + o * 32, block + o * stride, 2 * (step == last ? stride - step * 32 : 32));
            asm volatile("" ::: "memory");  // GCC does not know that tiles read memory
            _tile_loadd(4, part, 64);
        } else {
            for (long o = 0; o < 16; o++) __builtin_prefetch(block + (16 + o) * stride, 0, 2);
            _tile_loadd(4, block, 2 * stride);
        }
        _tile_loadd(5, own, 64); _tile_dpbf16ps(0, 4, 5);
        if (G > 1) { _tile_loadd(6, own + steps * 512, 64); _tile_dpbf16ps(1, 4, 6); }
        if (G > 2) { _tile_loadd(5, own + 2 * steps * 512, 64); _tile_dpbf16ps(2, 4, 5); }
        if (G > 3) { _tile_loadd(6, own + 3 * steps * 512, 64); _tile_dpbf16ps(3, 4, 6); }
    }
    _tile_stored(0, sums, 64);
    if (G > 1) _tile_stored(1, sums + 256, 64);
    if (G > 2) _tile_stored(2, sums + 512, 64);
    if (G > 3) _tile_stored(3, sums + 768, 64);
}

static void product_by_tiles(const bf16 *x, long x_row, const bf16 *weight, const bf16 *bias, bf16 *out, long out_row, long rows, long inputs, long outputs) {
    long steps = (inputs + 31) / 32, last = inputs % 32 ? steps - 1 : -1, groups = (rows + 15) / 16, blocks = (outputs + 15) / 16;
    bf16 *own = (bf16 *)calloc(groups * steps * 512, sizeof(bf16));
    for (long r = 0; r < rows; r++) for (long k = 0; k < inputs; k += 2) {
        bf16 *pair = own + ((r / 16 * steps + k / 32) * 16 + k % 32 / 2) * 32 + r % 16 * 2;
        pair[0] = x[r * x_row + k];
        if (k + 1 < inputs) pair[1] = x[r * x_row + k + 1];
    }
    Tiles tiles = {1, 0, {}, {}, {}};
    for (int t = 0; t < 8; t++) { tiles.bytes[t] = 64; tiles.rows[t] = 16; }
    asm volatile("" ::: "memory");
    #pragma omp parallel if (rows * inputs * outputs > 32768)
    {
        _tile_loadconfig(&tiles);
        #pragma omp for
        for (long block = 0; block < blocks; block++) {
            long first = block * 16, many = outputs - first < 16 ? outputs - first : 16;
            for (long g = 0; g < groups; g += 4) {
                float sums[4 * 256];
                const bf16 *part = own + g * steps * 512, *from = weight + first * inputs;
                if (groups - g == 1) product_tiles<1>(from, inputs, many, part, steps, last, sums);
                else if (groups - g == 2) product_tiles<2>(from, inputs, many, part, steps, last, sums);
                else if (groups - g == 3) product_tiles<3>(from, inputs, many, part, steps, last, sums);
                else product_tiles<4>(from, inputs, many, part, steps, last, sums);
                long end = rows - g * 16 < 64 ? rows - g * 16 : 64;
                for (long r = 0; r < end; r++) for (long o = 0; o < many; o++)
                    store(out + (g * 16 + r) * out_row + first + o, sums[r / 16 * 256 + o * 16 + r % 16] + (bias ? load(bias[first + o]) : 0));
            }
        }
        _tile_release();
    }
    free(own);
}
static void product_by_tiles(const float *, long, const float *, const float *, float *, long, long, long, long) {}  // never called
#endif

template <class T, class X>
static void product_blocks(const X *x, long x_row, const T *weight, const T *bias, T *out, long out_row, long rows, long inputs, long outputs) {
    long blocks = (outputs + OUTPUTS - 1) / OUTPUTS;
    #pragma omp parallel for if (rows * inputs * outputs > 32768)
    for (long block = 0; block < blocks; block++) {
        long first = block * OUTPUTS;
        if (first + OUTPUTS <= outputs) product_rows<T, OUTPUTS>(x, x_row, weight + first * inputs, bias ? bias + first : nullptr, inputs, out + first, out_row, rows);
        else for (long o = first; o < outputs; o++) product_rows<T, 1>(x, x_row, weight + o * inputs, bias ? bias + o : nullptr, inputs, out + o, out_row, rows);
    }
}

template <class T>
static void product(const T *x, long x_row, const T *weight, const T *bias, T *out, long out_row, long rows, long inputs, long outputs) {
#ifdef AMX
    if (sizeof(T) == 2 && has_tiles) { product_by_tiles(x, x_row, weight, bias, out, out_row, rows, inputs, outputs); return; }
#endif
#ifdef PAIRS
    if constexpr (sizeof(T) == 2) { product_blocks(x, x_row, weight, bias, out, out_row, rows, inputs, outputs); return; }
#endif
    enum { STEP = Line<T>::STEP, VECTORS = Line<T>::VECTORS };
    long padded = (inputs + STEP - 1) / STEP * STEP;
    float *lines = (float *)malloc(rows * padded * sizeof(float));
    for (long r = 0; r < rows; r++) for (long k = 0; k < inputs; k += STEP) {
        vec line[VECTORS];
        if (k + STEP <= inputs) load_line(x + r * x_row + k, line);
        else load_line(x + r * x_row + k, inputs - k, line);
        for (int v = 0; v < VECTORS; v++) store_vec(lines + r * padded + k + v * W, line[v]);
    }
    product_blocks((const float *)lines, padded, weight, bias, out, out_row, rows, inputs, outputs);
    free(lines);
}

// Decoder layers, one after the other. Numbers are of 8 bytes each, as kernels/cpu.py writes them.
struct Layer {
    const void *qkv, *qkv_bias, *out, *out_bias, *gate_up, *gate_up_bias, *down, *down_bias;
    const float *before_attention, *qk_norm, *after_attention, *before_mlp, *after_mlp;
    const float *before_attention_bias, *before_mlp_bias;  // of a LayerNorm; null: an RMSNorm
    double attention_eps, qk_eps, after_attention_eps, mlp_eps, after_mlp_eps, scale, softcap, factor;
    long heads, kv_heads, width, mlp, window, act, gated, parallel, interleaved, rotated;
    const void *table;
    void *cache, *captured;  // keys and values [B, slots, 2, G, D]; where to copy the layer's input, or null
    long table_row, cache_batch, cache_slot, cache_kind, cache_head;
};
struct Pass {
    long rows, queries, tree_keys, hidden, inputs, layers, positions_batch, positions_node, slots_batch, slots_node;
    long ancestors_batch, ancestors_query, depth_batch, key_depth_batch;
    double norm_eps;
};

template <class T>
static void decoder_layers(const Layer *layers, const Pass *pass, T *x, const T *inputs, T *normed, const float *norm,
                           const float *norm_bias, const int64_t *positions, const int64_t *slots, const int64_t *lengths,
                           const int64_t *ancestors, const int32_t *depth, const int32_t *key_depth) {
    long many = pass->rows * pass->queries, hidden = pass->hidden, heads_out = 0, qkv_out = 0, mlp = 0;
    for (long l = 0; l < pass->layers; l++) {
        const Layer &layer = layers[l];
        long out = layer.heads * layer.width, all = (layer.heads + 2 * layer.kv_heads) * layer.width;
        heads_out = out > heads_out ? out : heads_out;
        qkv_out = all > qkv_out ? all : qkv_out;
        mlp = layer.mlp > mlp ? layer.mlp : mlp;
    }
    long wide = qkv_out > 2 * mlp ? qkv_out : 2 * mlp, narrow = heads_out > mlp ? heads_out : mlp;
    narrow = narrow > hidden ? narrow : hidden;
    T *memory = (T *)malloc(many * (wide + 3 * narrow) * sizeof(T));
    T *first = memory, *second = first + many * wide, *third = second + many * narrow, *own = third + many * narrow;
    for (long l = 0; l < pass->layers; l++) {
        const Layer &layer = layers[l];
        long out = layer.heads * layer.width, all = (layer.heads + 2 * layer.kv_heads) * layer.width;
        T *cache = (T *)layer.cache;
        if (layer.captured) memcpy(layer.captured, x, many * hidden * sizeof(T));
        const T *from = l == 0 && inputs ? inputs : own;  // what q, k and v are products of
        if (from == own) {  // written by the layer before, or here
            if (l == 0) add_norm<T>(x, nullptr, nullptr, nullptr, 0, 1, layer.before_attention, layer.before_attention_bias, layer.attention_eps, own, many, hidden, hidden, 0, hidden);
        }
        long wide_in = from == own ? hidden : pass->inputs;
        product(from, wide_in, (const T *)layer.qkv, (const T *)nullptr, first, all, many, wide_in, all);
        rotate_write(first, (const T *)layer.table, positions, slots, cache, second, (const T *)layer.qkv_bias, layer.qk_norm, layer.qk_eps,
                     pass->rows, pass->queries, layer.heads, layer.kv_heads, layer.width, all, layer.table_row,
                     pass->positions_batch, pass->positions_node, pass->slots_batch, pass->slots_node, layer.cache_batch,
                     layer.cache_slot, layer.cache_kind, layer.cache_head, layer.width, layer.rotated, layer.interleaved);
        Shape shape = {pass->rows, pass->queries, pass->tree_keys, layer.heads, layer.kv_heads, layer.width, layer.window,
                       pass->queries * out, layer.width, out, layer.cache_batch, layer.cache_head, layer.cache_slot,
                       layer.cache_batch, layer.cache_head, layer.cache_slot, pass->queries * out, layer.width, out,
                       pass->ancestors_batch, pass->ancestors_query, pass->depth_batch, pass->key_depth_batch};
        attend(second, cache, cache + layer.cache_kind, lengths, ancestors, depth, key_depth, third, &shape, layer.scale, layer.softcap);
        product(third, out, (const T *)layer.out, (const T *)nullptr, second, hidden, many, out, hidden);
        if (layer.parallel)  // the MLP reads the x before attention's branch is added
            add_norm<T>(x, nullptr, nullptr, nullptr, 0, 1, layer.before_mlp, layer.before_mlp_bias, layer.mlp_eps, own, many, hidden, hidden, 0, hidden);
        add_norm(x, second, (const T *)layer.out_bias, layer.after_attention, layer.after_attention_eps, layer.factor,
                 layer.parallel ? nullptr : layer.before_mlp, layer.before_mlp_bias, layer.mlp_eps, own, many, hidden, hidden, hidden, hidden);
        long up = layer.gated ? 2 * layer.mlp : layer.mlp;
        product(own, hidden, (const T *)layer.gate_up, (const T *)nullptr, first, up, many, hidden, up);
        gated(first, second, (const T *)layer.gate_up_bias, layer.act, layer.gated, many, layer.mlp, up, layer.mlp);
        product(second, layer.mlp, (const T *)layer.down, (const T *)nullptr, third, hidden, many, layer.mlp, hidden);
        bool last = l + 1 == pass->layers;
        const float *after = last ? norm : layers[l + 1].before_attention;
        const float *after_bias = last ? norm_bias : layers[l + 1].before_attention_bias;
        add_norm(x, third, (const T *)layer.down_bias, layer.after_mlp, layer.after_mlp_eps, layer.factor, after, after_bias,
                 last ? pass->norm_eps : layers[l + 1].attention_eps, last ? normed : own, many, hidden, hidden, hidden, hidden);
    }
    free(memory);
}

// ---- Coupled sampling: the best tokens of log p + Gumbel noise (kernels/coupled.py has the definition).

static inline void wide_product(uvec a, uint32_t factor, uvec &high, uvec &low) {
    typedef uint64_t lvec __attribute__((vector_size(4 * W)));
#if defined(__AVX512F__)
    lvec even = (lvec)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi32(int(factor)));
    lvec odd = (lvec)_mm512_mul_epu32((__m512i)((lvec)a >> 32), _mm512_set1_epi32(int(factor)));
#elif defined(__AVX2__)
    lvec even = (lvec)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi32(int(factor)));
    lvec odd = (lvec)_mm256_mul_epu32((__m256i)((lvec)a >> 32), _mm256_set1_epi32(int(factor)));
#else
    lvec even = ((lvec)a & 0xffffffffu) * uint64_t(factor), odd = ((lvec)a >> 32) * uint64_t(factor);
#endif
    high = (uvec)((even >> 32) | (odd & 0xffffffff00000000ull));
    low = (uvec)((even & 0xffffffffu) | (odd << 32));
}

static void philox(uvec *words, uvec counter, int64_t position, int64_t seed) {  // 4 × 32, 10 rounds
    uvec c0 = counter, c1 = uvec{} + uint32_t(position), c2 = uvec{} + uint32_t(uint64_t(position) >> 32);
    uvec c3 = uvec{} + 0x434f5550u;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(uint64_t(seed) >> 32);
    for (int round = 0; round < 10; round++) {
        uvec high0, low0, high2, low2;
        wide_product(c0, 0xD2511F53u, high0, low0);
        wide_product(c2, 0xCD9E8D57u, high2, low2);
        c0 = high2 ^ c1 ^ k0;
        c1 = low2;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

struct Draw {  // the parameters of one row
    float temperature, top_p, min_p;
    int64_t top_k, seed, position;
};
enum { MOST = 64 };  // tokens that are asked for

static inline bool any(ivec mask) {
    int64_t parts[W / 2], all = 0;
    memcpy(parts, &mask, sizeof parts);
    for (int i = 0; i < W / 2; i++) all |= parts[i];
    return all != 0;
}

// Scores s + g of the tokens with s ≥ floor, s = (x − top) / T: the `count` best of them, best first, as many as there
// are. A token is looked at only where its noise could bring it above the worst of these: E = −log(1 − u) ≥ u, so it
// has to have u ≤ exp(s − worst).
template <class T>
static long best_scores(const T *x, long vocabulary, const int64_t *ids, float top, float scale, float floor,
                        const Draw &draw, long count, float bound, float *scores, float *gaps, int64_t *places) {
    long found = 0;
    const bool noisy = draw.temperature > 0;
    ivec lanes;
    for (int i = 0; i < W; i++) lanes[i] = i;
    auto worst = [&] { return found == count && scores[count - 1] > bound ? scores[count - 1] : bound; };
    auto insert = [&](float score, float gap, long place) {
        if (found == count && !(score > scores[count - 1])) return;
        long at = found < count ? found++ : count - 1;
        for (; at > 0 && score > scores[at - 1]; at--) {
            scores[at] = scores[at - 1], gaps[at] = gaps[at - 1], places[at] = places[at - 1];
        }
        scores[at] = score, gaps[at] = gap, places[at] = place;
    };
    auto look = [&](vec gap, ivec open, uvec words, long first) {
        vec u = (__builtin_convertvector(words >> 1, vec) + 0.25f) * 4.656612873e-10f;  // of 2^31: signed conversion
        ivec passing = open & (u * 0.9999f <= exp_vec(gap - worst()));
        if (!any(passing)) return;
        for (int l = 0; l < W; l++) {
            if (!passing[l]) continue;
            float uniform = std::min((float(words[l]) + 0.5f) * 2.328306437e-10f, 0.99999994f);
            insert(gap[l] - std::log(-std::log1p(-uniform)), gap[l], first + l);
        }
    };
    for (long first = 0; first < vocabulary; first += 64) {  // 16 counters of four words: word j of the j-th 16 tokens
        vec gap[64 / W];
        ivec open[64 / W], some = {};
        for (int part = 0; part < 64 / W; part++) {
            long at = first + part * W, many = vocabulary - at;
            gap[part] = many > 0 ? (load_vec(x + at, many) - top) * scale : vec{};
            open[part] = (gap[part] >= floor) & (lanes < int32_t(std::min(many, 64L)));
            // The largest noise is −log 2⁻³³ = 22.88.
            open[part] &= gap[part] > (noisy ? worst() - 22.9f : found < count ? -INFINITY : scores[count - 1]);
            some |= open[part];
        }
        if (!any(some)) continue;
        for (int part = 0; part < 64 / W; part++) {
            if (noisy || !any(open[part])) continue;
            for (int l = 0; l < W; l++) if (open[part][l]) insert(gap[part][l], gap[part][l], first + part * W + l);
        }
        if (!noisy) continue;
        if (!ids) {
            for (int half = 0; half < 16 / W; half++) {
                uvec words[4];
                philox(words, (uvec)(lanes + int32_t(first / 4 + half * W)), draw.position, draw.seed);
                for (int word = 0; word < 4; word++) {
                    int part = word * (16 / W) + half;
                    look(gap[part], open[part], words[word], first + part * W);
                }
            }
            continue;
        }
        for (int part = 0; part < 64 / W; part++) {
            if (!any(open[part])) continue;
            uvec words[4], token = {}, chosen = {};
            for (int l = 0; l < W && first + part * W + l < vocabulary; l++) token[l] = uint32_t(ids[first + part * W + l]);
            philox(words, (token >> 6) * 16 + (token & 15), draw.position, draw.seed);
            for (uint32_t word = 0; word < 4; word++) chosen |= words[word] & (uvec)(((token >> 4) & 3) == word);
            look(gap[part], open[part], chosen, first + part * W);
        }
    }
    return found;
}

template <class T>
static float top_k_floor(const T *x, long vocabulary, float top, float scale, long k) {  // the k-th largest s
    std::vector<float> kept;
    kept.reserve(k);
    for (long at = 0; at < vocabulary; at += W) {
        long many = vocabulary - at;
        vec gap = (load_vec(x + at, many) - top) * scale;
        bool full = long(kept.size()) == k;
        if (full && !any(gap > kept[0])) continue;
        for (int l = 0; l < std::min(many, long(W)); l++) {
            if (long(kept.size()) == k) {
                if (!(gap[l] > kept[0])) continue;
                std::pop_heap(kept.begin(), kept.end(), std::greater<float>());
                kept.back() = gap[l];
            } else {
                kept.push_back(gap[l]);
            }
            std::push_heap(kept.begin(), kept.end(), std::greater<float>());
        }
    }
    return kept[0];
}

// Σ exp(s) of the tokens with s > floors[i], for each i.
template <class T>
static void masses_above(const T *x, long vocabulary, float top, float scale, const float *floors, long count, float *out) {
    vec sums[MOST] = {};
    for (long at = 0; at < vocabulary; at += W) {
        long many = vocabulary - at;
        vec gap = (load_vec(x + at, many) - top) * scale;
        vec weight = exp_vec(gap);
        if (many < W) for (long l = many; l < W; l++) weight[l] = 0;
        for (long i = 0; i < count; i++) sums[i] += (vec)((ivec)weight & (gap > floors[i]));
    }
    for (long i = 0; i < count; i++) {
        out[i] = 0;
        for (int l = 0; l < W; l++) out[i] += sums[i][l];
    }
}

template <class T>
static void coupled_row(const T *x, long vocabulary, const int64_t *ids, const Draw &draw, long count, float *best,
                        float *scores, int64_t *tokens) {
    vec highest = splat(-INFINITY);
    ivec bad = {};
    for (long at = 0; at < vocabulary; at += W) {
        vec value = load_vec(x + at, vocabulary - at);
        if (vocabulary - at < W) for (long l = vocabulary - at; l < W; l++) value[l] = -INFINITY;
        bad |= (value != value);
        highest = value > highest ? value : highest;
    }
    float top = -INFINITY;
    for (int l = 0; l < W; l++) top = std::max(top, highest[l]);
    *best = any(bad) ? NAN : top;
    long found = 0;
    if (std::abs(*best) < INFINITY) {
        float scale = draw.temperature > 0 ? 1.0f / draw.temperature : 1.0f, floor = -INFINITY, gaps[MOST], masses[MOST];
        bool filtered = draw.temperature > 0, nucleus = filtered && draw.top_p < 1;
        if (filtered && draw.top_k > 0 && draw.top_k < vocabulary) floor = top_k_floor(x, vocabulary, top, scale, draw.top_k);
        float whole = std::isfinite(floor) ? std::nextafter(floor, -INFINITY) : -INFINITY, total = 0;
        if (nucleus) masses_above(x, vocabulary, top, scale, &whole, 1, &total);
        if (filtered && draw.min_p > 0) floor = std::max(floor, std::log(draw.min_p));
        for (bool again = true; again;) {
            // The lanes' maxima are so many different tokens, each with g ≥ −log 16.7.
            float sorted[W], bound = -INFINITY;
            for (int l = 0; l < W; l++) sorted[l] = (highest[l] - top) * scale;
            std::sort(sorted, sorted + W, std::greater<float>());
            if (count <= W && sorted[count - 1] >= floor) bound = sorted[count - 1] - 3.2f;
            found = best_scores(x, vocabulary, ids, top, scale, floor, draw, count, bound, scores, gaps, tokens);
            again = false;
            if (!nucleus || !found) break;
            masses_above(x, vocabulary, top, scale, gaps, found, masses);
            for (long i = 0; i < found; i++) {  // of two tokens the likelier one is kept if the other is
                if (gaps[i] < 0 && masses[i] >= draw.top_p * total && gaps[i] >= floor) {
                    floor = std::nextafter(gaps[i], INFINITY), again = true;
                }
            }
        }
    }
    for (long place = 0; found < count; place++) {  // fewer are kept than asked for: further ones of no probability
        if (std::find(tokens, tokens + found, place) != tokens + found) continue;
        scores[found] = -INFINITY, tokens[found++] = place;
    }
    if (ids) for (long i = 0; i < count; i++) tokens[i] = std::max<int64_t>(ids[tokens[i]], 0);
}

template <class T>
static void coupled(const T *logits, long rows, long nodes, long vocabulary, const int64_t *ids, long ids_row,
                    const float *temperature, const int64_t *top_k, const float *top_p, const float *min_p,
                    const int64_t *seed, const int64_t *positions, long count, float *best, float *scores,
                    int64_t *tokens) {
    #pragma omp parallel for if (rows * nodes > 1)
    for (long n = 0; n < rows * nodes; n++) {
        long row = n / nodes;
        Draw draw = {temperature[row], top_p[row], min_p[row], top_k[row], seed[row], positions[n]};
        coupled_row(logits + n * vocabulary, vocabulary, ids ? ids + row * ids_row : nullptr, draw, count, best + n,
                    scores + n * count, tokens + n * count);
    }
}

#define EXPORT(T, suffix)                                                                                             \
    extern "C" void add_norm_##suffix(T *x, const T *y, const T *bias, const float *after, float after_eps,           \
                                      float factor, const float *weight, float eps, T *out, long rows, long width,    \
                                      long x_row, long y_row, long out_row) {                                         \
        add_norm(x, y, bias, after, after_eps, factor, weight, (const float *)nullptr, eps, out, rows, width, x_row,  \
                 y_row, out_row);                                                                                     \
    }                                                                                                                 \
    extern "C" void gated_##suffix(const T *gate_up, T *out, const T *bias, long act, long rows, long width,          \
                                   long row_stride, long out_row) {                                                   \
        gated(gate_up, out, bias, act, true, rows, width, row_stride, out_row);                                       \
    }                                                                                                                 \
    extern "C" void rotate_write_##suffix(                                                                            \
        const T *qkv, const T *table, const int64_t *positions, const int64_t *slots, T *cache, T *q_out,             \
        const T *bias, const float *norm, float eps, long rows, long count, long heads, long kv_heads, long width,    \
        long qkv_row, long table_row, long positions_batch, long positions_node, long slots_batch, long slots_node,   \
        long cache_batch, long cache_slot, long cache_kind, long cache_head, long norm_head) {                        \
        rotate_write(qkv, table, positions, slots, cache, q_out, bias, norm, eps, rows, count, heads, kv_heads,       \
                     width, qkv_row, table_row, positions_batch, positions_node, slots_batch, slots_node,             \
                     cache_batch, cache_slot, cache_kind, cache_head, norm_head, width, false);                       \
    }                                                                                                                 \
    extern "C" void product_##suffix(const T *x, long x_row, const T *weight, const T *bias, T *out, long out_row,    \
                                     long rows, long inputs, long outputs) {                                          \
        product(x, x_row, weight, bias, out, out_row, rows, inputs, outputs);                                         \
    }                                                                                                                 \
    extern "C" void decoder_layers_##suffix(                                                                          \
        const Layer *layers, const Pass *pass, T *x, const T *inputs, T *normed, const float *norm,                   \
        const float *norm_bias, const int64_t *positions, const int64_t *slots, const int64_t *lengths,               \
        const int64_t *ancestors, const int32_t *depth, const int32_t *key_depth) {                                   \
        decoder_layers(layers, pass, x, inputs, normed, norm, norm_bias, positions, slots, lengths, ancestors, depth, \
                       key_depth);                                                                                    \
    }                                                                                                                 \
    extern "C" void coupled_##suffix(const T *logits, long rows, long nodes, long vocabulary, const int64_t *ids,     \
                                     long ids_row, const float *temperature, const int64_t *top_k,                    \
                                     const float *top_p, const float *min_p, const int64_t *seed,                     \
                                     const int64_t *positions, long count, float *best, float *scores,                \
                                     int64_t *tokens) {                                                               \
        coupled(logits, rows, nodes, vocabulary, ids, ids_row, temperature, top_k, top_p, min_p, seed, positions,     \
                count, best, scores, tokens);                                                                         \
    }                                                                                                                 \
    extern "C" void attend_##suffix(const T *q, const T *k, const T *v, const int64_t *lengths,                       \
                                    const int64_t *ancestors, const int32_t *depth, const int32_t *key_depth, T *out, \
                                    const Shape *shape, float scale, float softcap) {                                 \
        attend(q, k, v, lengths, ancestors, depth, key_depth, out, shape, scale, softcap);                            \
    }

EXPORT(float, float32)
EXPORT(bf16, bfloat16)
