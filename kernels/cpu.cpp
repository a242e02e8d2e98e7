// A decoder layer for a few rows on a CPU, and coupled sampling: kernels/cpu.py compiles this file with those in cpu/, and
// calls the functions below.
//
// Every function computes each row by itself: the order of its sums depends on the row's own values, on the width, and
// in attention on the positions of its keys, but neither on the number of rows nor on the slots where keys lie. So a
// drafted token gets the bits that plain decoding gives it. Arithmetic is in float32, and each result is rounded once.

#include "cpu/coupled.h"
#include "cpu/layers.h"

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
        const LayerArguments *layers, const PassArguments *pass, T *x, const T *inputs, T *normed, const float *norm, \
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
