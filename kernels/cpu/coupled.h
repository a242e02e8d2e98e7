// Coupled sampling: the best tokens of log p + Gumbel noise (kernels/coupled.py has the definition).
#pragma once
#include "vectors.h"

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
