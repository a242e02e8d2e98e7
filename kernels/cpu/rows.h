// What stands between the products of a layer: norms, the gated activation, rotary embedding with the write to the cache.
#pragma once
#include "vectors.h"

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
