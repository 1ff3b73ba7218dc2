/* 3x3 convolutions with a quarter of the multiplications: Winograd's minimal filtering, F(4x4, 3x3).

   Six by six pixels go over into 36 other numbers, and so do the nine weights between two channels. The products of
   the two, summed over channels, go back into four by four pixels of the result (Lavin and Gray, arXiv 1509.09308; the
   interpolation points are 0, 1, -1, 2, -2 and infinity). Gradients go the same way back.

   Pictures are [pictures, rows, columns, channels], and channels come sixteen at a time. TILES squares are done at
   once, so that what is transformed stays in a core's own cache: [place, channels / 16, square, 16]. */

#include <string.h>

#include "native.h"

#define TILES 24
#define SOME_TIMES 8 /* so many sums are added up before they are added to all: long sums in float32 are rough ones */

typedef struct {
    long pictures, inside, outside; /* channels */
    long rows, columns;             /* of pictures, */
    long above, beside;             /* with so many of zeros on each side */
    long height, width;             /* of the result, or of the largest of two by two numbers of it */
    long tall, wide;                /* squares */
    long pool;
} Shape;

PRODUCT(four, 4)
PRODUCT(two, 8)
PRODUCT(one, 8)

/* Squares times weights: [inside / 16, TILES, 16] and [inside, outside] give [outside / 16, TILES, 16]. */
static void times(const float *a, long inside, const float *b, long outside, float *c)
{
    const long full = TILES * LANES;
    long v = 0, vecs = outside / LANES;
#define SOME(T, ROWS, VECS)                                                                                            \
    for (; v + VECS <= vecs; v += VECS)                                                                                \
        for (long t = 0; t < TILES; t += ROWS)                                                                         \
            product_##T##_##ROWS(a + t * LANES, LANES, 1, LANES, full, inside / LANES, b + v * LANES, outside, LANES,           \
                        c + v * full + t * LANES, LANES, full, 0);
    SOME(four, 4, 4)
    SOME(two, 8, 2)
    SOME(one, 8, 1)
#undef SOME
}

/* The gradient of weights, perhaps added to one: transposed [inside / 16, TILES, 16] and [outside / 16, TILES, 16]. */
static void times_transposed(const float *a, long inside, const float *b, long outside, float *c, int add)
{
    const long full = TILES * LANES;
    long v = 0, vecs = outside / LANES;
#define SOME(T, ROWS, VECS)                                                                                            \
    for (; v + VECS <= vecs; v += VECS)                                                                                \
        for (long r = 0; r < inside; r += ROWS)                                                                        \
            product_##T##_##ROWS(a + r / LANES * full + r % LANES, 1, LANES, TILES, 0, 1, b + v * full, LANES, full,            \
                        c + r * outside + v * LANES, outside, LANES, add);
    SOME(four, 4, 4)
    SOME(two, 8, 2)
    SOME(one, 8, 1)
#undef SOME
}

/* The transforms of one line; their transposes are the ways back. */
INLINE void into(const vec *d, long s, vec *o, long t)
{
    vec a = d[4 * s] - 4 * d[2 * s], b = d[3 * s] - 4 * d[s], e = d[4 * s] - d[2 * s], f = 2 * (d[3 * s] - d[s]);
    o[0] = 4 * d[0] - 5 * d[2 * s] + d[4 * s];
    o[t] = a + b, o[2 * t] = a - b, o[3 * t] = e + f, o[4 * t] = e - f;
    o[5 * t] = 4 * d[s] - 5 * d[3 * s] + d[5 * s];
}

INLINE void from(const vec *d, long s, vec *o, long t)
{
    vec a = d[s] + d[2 * s], b = d[2 * s] - d[s], e = d[3 * s] + d[4 * s], f = 2 * (d[4 * s] - d[3 * s]);
    o[0] = 4 * d[0];
    o[t] = 4 * b + f + 4 * d[5 * s];
    o[2 * t] = -5 * d[0] - 4 * a - e;
    o[3 * t] = -b - f - 5 * d[5 * s];
    o[4 * t] = d[0] + a + e;
    o[5 * t] = d[5 * s];
}

INLINE void back(const vec *d, long s, vec *o, long t)
{
    vec a = d[s] + d[2 * s], b = d[s] - d[2 * s], e = d[3 * s] + d[4 * s], f = d[3 * s] - d[4 * s];
    o[0] = d[0] + a + e, o[t] = b + 2 * f, o[2 * t] = a + 4 * e, o[3 * t] = b + 8 * f + d[5 * s];
}

INLINE void forth(const vec *d, long s, vec *o, long t)
{
    vec a = d[0] + d[2 * s], b = d[s] + d[3 * s], e = d[0] + 4 * d[2 * s], f = 2 * d[s] + 8 * d[3 * s];
    o[0] = d[0], o[t] = a + b, o[2 * t] = a - b, o[3 * t] = e + f, o[4 * t] = e - f, o[5 * t] = d[3 * s];
}

typedef struct { long picture, row, column; } Place;

INLINE Place place_of(const Shape *s, long n)
{
    long each = s->tall * s->wide, rest = n % each;
    return (Place){n / each, rest / s->wide * 4, rest % s->wide * 4};
}

/* Squares from `first` on, transformed. Those past the end are zeros. */
static void squares(const Shape *s, const float *x, long first, long count, float *made)
{
    const long c = s->inside, vecs = c / LANES, apart = vecs * TILES * LANES;
    if (count < TILES) memset(made, 0, 36 * apart * sizeof(float));
    for (long t = 0; t < count; t++) {
        Place p = place_of(s, first + t);
        long top = p.row - s->above, left = p.column - s->beside;
        int within = top >= 0 && left >= 0 && top + 6 <= s->rows && left + 6 <= s->columns;
        const float *at = x + ((p.picture * s->rows + top) * s->columns + left) * c;
        for (long v = 0; v < vecs; v++) {
            vec d[36], m[36];
            for (long i = 0; i < 6; i++)
                UNROLL for (long j = 0; j < 6; j++) {
                    int here = within || ((unsigned long)(top + i) < (unsigned long)s->rows &&
                                          (unsigned long)(left + j) < (unsigned long)s->columns);
                    d[6 * i + j] = here ? load(at + (i * s->columns + j) * c + v * LANES) : (vec){0};
                }
            UNROLL for (int j = 0; j < 6; j++) into(d + j, 6, m + j, 6);
            for (int i = 0; i < 6; i++) {
                into(m + 6 * i, 1, d, 1);
                UNROLL for (int j = 0; j < 6; j++) store(made + (6 * i + j) * apart + (v * TILES + t) * LANES, d[j]);
            }
        }
    }
}

/* The gradient of pictures, added to where squares overlap. */
static void from_squares(const Shape *s, const float *g, long first, long count, float *x)
{
    const long c = s->inside, vecs = c / LANES, apart = vecs * TILES * LANES;
    for (long t = 0; t < count; t++) {
        Place p = place_of(s, first + t);
        long top = p.row - s->above, left = p.column - s->beside;
        for (long v = 0; v < vecs; v++) {
            vec d[36], m[36];
            for (int n = 0; n < 36; n++) d[n] = load(g + n * apart + (v * TILES + t) * LANES);
            UNROLL for (int j = 0; j < 6; j++) from(d + j, 6, m + j, 6);
            for (long i = 0; i < 6; i++) {
                if ((unsigned long)(top + i) >= (unsigned long)s->rows) continue;
                from(m + 6 * i, 1, d, 1);
                float *at = x + ((p.picture * s->rows + top + i) * s->columns + left) * c + v * LANES;
                UNROLL for (long j = 0; j < 6; j++)
                    if ((unsigned long)(left + j) < (unsigned long)s->columns) store(at + j * c, load(at + j * c) + d[j]);
            }
        }
    }
}

/* Results, or the largest of two by two of them cut off at zero, with which of the four it was (4: it was cut off). */
static void results(const Shape *s, const float *m, const float *bias, long first, long count, float *y,
                    unsigned char *which)
{
    const long k = s->outside, vecs = k / LANES, apart = vecs * TILES * LANES, side = s->pool ? 2 : 4;
    for (long t = 0; t < count; t++) {
        Place p = place_of(s, first + t);
        long top = s->pool ? p.row / 2 : p.row, left = s->pool ? p.column / 2 : p.column;
        for (long v = 0; v < vecs; v++) {
            vec d[36], l[24], o[16], add = bias ? load(bias + v * LANES) : (vec){0};
            for (int n = 0; n < 36; n++) d[n] = load(m + n * apart + (v * TILES + t) * LANES);
            UNROLL for (int j = 0; j < 6; j++) back(d + j, 6, l + j, 6);
            UNROLL for (int i = 0; i < 4; i++) back(l + 6 * i, 1, o + 4 * i, 1);
            for (long i = 0; i < side && top + i < s->height; i++)
                for (long j = 0; j < side && left + j < s->width; j++) {
                    long at = ((p.picture * s->height + top + i) * s->width + left + j) * k + v * LANES;
                    if (!s->pool) {
                        store(y + at, o[4 * i + j] + add);
                        continue;
                    }
                    vec best = o[8 * i + 2 * j];
                    ints found = {0};
                    UNROLL for (int n = 1; n < 4; n++) {
                        vec other = o[8 * i + 2 * j + n / 2 * 4 + n % 2];
                        ints more = (other > best) | (other != other);
                        best = pick(more, other, best);
                        found = choose(more, n - (ints){0}, found);
                    }
                    best += add;
                    ints cut = best <= 0;
                    store(y + at, pick(cut, (vec){0}, best));
                    *(bytes *)(which + at) = __builtin_convertvector(choose(cut, 4 - (ints){0}, found), bytes);
                }
        }
    }
}

/* The way back; what results have been added to has the sum of their gradients. */
static void from_results(const Shape *s, const float *g, const unsigned char *which, long first, long count,
                         float *made, float *bias)
{
    const long k = s->outside, vecs = k / LANES, apart = vecs * TILES * LANES, side = s->pool ? 2 : 4;
    if (count < TILES) memset(made, 0, 36 * apart * sizeof(float));
    for (long v = 0; v < vecs; v++) {
        vec total = {0};
        for (long t = 0; t < count; t++) {
            Place p = place_of(s, first + t);
            long top = s->pool ? p.row / 2 : p.row, left = s->pool ? p.column / 2 : p.column;
            vec d[16], l[24], o[6], sum = {0};
            for (long i = 0; i < side; i++)
                for (long j = 0; j < side; j++) {
                    int here = top + i < s->height && left + j < s->width;
                    long at = ((p.picture * s->height + top + i) * s->width + left + j) * k + v * LANES;
                    vec one = here ? load(g + at) : (vec){0};
                    if (!s->pool) {
                        d[4 * i + j] = one, sum += one;
                        continue;
                    }
                    ints found = 4 - (ints){0};
                    if (here) found = __builtin_convertvector(*(const bytes *)(which + at), ints);
                    UNROLL for (int n = 0; n < 4; n++) {
                        vec part = pick(found == n, one, (vec){0});
                        d[8 * i + 2 * j + n / 2 * 4 + n % 2] = part, sum += part;
                    }
                }
            total += sum;
            UNROLL for (int j = 0; j < 4; j++) forth(d + j, 4, l + j, 4);
            for (int i = 0; i < 6; i++) {
                forth(l + 4 * i, 1, o, 1);
                UNROLL for (int j = 0; j < 6; j++) store(made + (6 * i + j) * apart + (v * TILES + t) * LANES, o[j]);
            }
        }
        store(bias + v * LANES, load(bias + v * LANES) + total);
    }
}

static const float WEIGHT[6][3] = {{.25f, 0, 0}, {-1 / 6.f, -1 / 6.f, -1 / 6.f}, {-1 / 6.f, 1 / 6.f, -1 / 6.f},
                                   {1 / 24.f, 1 / 12.f, 1 / 6.f}, {1 / 24.f, -1 / 12.f, 1 / 6.f}, {0, 0, 1}};

/* Weights [ahead, 3, 3, behind], transformed: [36, ahead, behind]. */
static void weights(const float *w, long ahead, long behind, float *made)
{
    for (long a = 0; a < ahead; a++)
        for (long v = 0; v < behind; v += LANES) {
            vec l[18];
            UNROLL for (int i = 0; i < 6; i++)
                UNROLL for (int j = 0; j < 3; j++) {
                    l[3 * i + j] = (vec){0};
                    UNROLL for (int n = 0; n < 3; n++) l[3 * i + j] += WEIGHT[i][n] * load(w + (9 * a + 3 * n + j) * behind + v);
                }
            UNROLL for (int i = 0; i < 6; i++)
                UNROLL for (int j = 0; j < 6; j++) {
                    vec o = {0};
                    UNROLL for (int n = 0; n < 3; n++) o += WEIGHT[j][n] * l[3 * i + n];
                    store(made + ((6 * i + j) * ahead + a) * behind + v, o);
                }
        }
}

/* The way back. */
static void from_weights(const float *g, long ahead, long behind, float *made)
{
    for (long a = 0; a < ahead; a++)
        for (long v = 0; v < behind; v += LANES) {
            vec l[18];
            UNROLL for (int i = 0; i < 3; i++)
                UNROLL for (int j = 0; j < 6; j++) {
                    l[6 * i + j] = (vec){0};
                    UNROLL for (int n = 0; n < 6; n++) l[6 * i + j] += WEIGHT[n][i] * load(g + ((6 * n + j) * ahead + a) * behind + v);
                }
            UNROLL for (int i = 0; i < 3; i++)
                UNROLL for (int j = 0; j < 3; j++) {
                    vec o = {0};
                    UNROLL for (int n = 0; n < 6; n++) o += WEIGHT[n][j] * l[6 * i + n];
                    store(made + (9 * a + 3 * i + j) * behind + v, o);
                }
        }
}

/* [a, 9, b] to [b, 9, a] */
static void turned(const float *from, long a, long b, float *to)
{
    for (long j = 0; j < b; j++)
        for (long n = 0; n < 9; n++)
            for (long i = 0; i < a; i++) to[(9 * j + n) * a + i] = from[(9 * i + n) * b + j];
}

/* Numbers of float32 that are needed for a moment. */
long isofed_room(const Shape *s)
{
    long channels = s->inside * s->outside;
    return 36 * (TILES * (s->inside + s->outside) + 3 * channels) + 9 * channels;
}

void isofed_forward(const Shape *s, const float *x, const float *w, const float *bias, float *y, unsigned char *which,
                    float *room)
{
    const long c = s->inside, k = s->outside, count = s->pictures * s->tall * s->wide;
    float *v = room, *m = v + 36 * TILES * c, *u = m + 36 * TILES * k, *t = u + 36 * c * k;
    turned(w, k, c, t);
    weights(t, c, k, u);
    for (long n = 0; n < count; n += TILES) {
        long some = count - n < TILES ? count - n : TILES;
        squares(s, x, n, some, v);
        for (long p = 0; p < 36; p++) times(v + p * TILES * c, c, u + p * c * k, k, m + p * TILES * k);
        results(s, m, bias, n, some, y, which);
    }
}

/* Gradients of pictures, of weights and of the bias; the first two only where there is a place for them. */
void isofed_backward(const Shape *s, const float *x, const float *w, const float *g, const unsigned char *which,
                     float *dx, float *dw, float *dbias, float *room)
{
    const long c = s->inside, k = s->outside, count = s->pictures * s->tall * s->wide;
    float *v = room, *m = v + 36 * TILES * c, *u = m + 36 * TILES * k, *du = u + 36 * c * k;
    float *whole = du + 36 * c * k, *t = whole + 36 * c * k;
    memset(dbias, 0, k * sizeof(float));
    if (dx) {
        memset(dx, 0, s->pictures * s->rows * s->columns * c * sizeof(float));
        weights(w, k, c, u);
    }
    if (dw) memset(whole, 0, 36 * c * k * sizeof(float));
    for (long n = 0; n < count; n += TILES) {
        long some = count - n < TILES ? count - n : TILES;
        from_results(s, g, which, n, some, m, dbias);
        if (dw) {
            squares(s, x, n, some, v);
            long time = n / TILES % SOME_TIMES;
            for (long p = 0; p < 36; p++)
                times_transposed(v + p * TILES * c, c, m + p * TILES * k, k, du + p * c * k, time > 0);
            if (time == SOME_TIMES - 1 || n + TILES >= count)
                for (long i = 0; i < 36 * c * k; i++) whole[i] += du[i];
        }
        if (dx) {
            for (long p = 0; p < 36; p++) times(m + p * TILES * k, k, u + p * c * k, c, v + p * TILES * c);
            from_squares(s, v, n, some, dx);
        }
    }
    if (dw) {
        from_weights(whole, c, k, t);
        turned(t, c, k, dw);
    }
}
