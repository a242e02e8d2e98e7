// Attention. A task is W lanes of one row of the batch and key/value head: (query, head of the group). Lanes hold
// scores [keys, W]; each lane adds up its own keys in the order of their slots, which along a path of the tree is the
// order of their positions. A key that a lane does not see adds an exact zero.
#pragma once
#include "vectors.h"

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
