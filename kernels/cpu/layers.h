// Decoder layers, one after the other. Numbers are of 8 bytes each, as kernels/cpu.py writes them.
#pragma once
#include "attention.h"
#include "products.h"
#include "rows.h"

struct LayerArguments {
    const void *qkv, *qkv_bias, *out, *out_bias, *gate_up, *gate_up_bias, *down, *down_bias;
    const float *before_attention, *qk_norm, *after_attention, *before_mlp, *after_mlp;
    const float *before_attention_bias, *before_mlp_bias;  // of a LayerNorm; null: an RMSNorm
    double attention_eps, qk_eps, after_attention_eps, mlp_eps, after_mlp_eps, scale, softcap, factor;
    long heads, kv_heads, width, mlp, window, act, gated, parallel, interleaved, rotated;
    const void *table;
    void *cache, *captured;  // keys and values [B, slots, 2, G, D]; where to copy the layer's input, or null
    long table_row, cache_batch, cache_slot, cache_kind, cache_head;
};
struct PassArguments {
    long rows, queries, tree_keys, hidden, inputs, layers, positions_batch, positions_node, slots_batch, slots_node;
    long ancestors_batch, ancestors_query, depth_batch, key_depth_batch;
    double norm_eps;
};

template <class T>
static void decoder_layers(const LayerArguments *layers, const PassArguments *pass, T *x, const T *inputs, T *normed, const float *norm,
                           const float *norm_bias, const int64_t *positions, const int64_t *slots, const int64_t *lengths,
                           const int64_t *ancestors, const int32_t *depth, const int32_t *key_depth) {
    long many = pass->rows * pass->queries, hidden = pass->hidden, heads_out = 0, qkv_out = 0, mlp = 0;
    for (long l = 0; l < pass->layers; l++) {
        const LayerArguments &layer = layers[l];
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
        const LayerArguments &layer = layers[l];
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
