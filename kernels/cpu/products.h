// Products: out = x weightᵀ + bias, weight [outputs, inputs] as PyTorch holds it. A number is the sum of W partial sums,
// each over every W-th input, whatever the number of rows. STEP inputs are read together: one vector of floats, or the
// even and the odd ones of 2 W in bfloat16, whose bits are the upper half of a float's. x is converted to rows of floats
// in that order.
#pragma once
#include "vectors.h"

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
