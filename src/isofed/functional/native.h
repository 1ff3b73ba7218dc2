/* What the C files share: sixteen numbers at a time, and products of small matrices.

   Vectors are those of GCC and Clang, so a compiler takes what the processor has. */

#define LANES 16
#define UNROLL _Pragma("GCC unroll 32")
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef unsigned char bytes __attribute__((vector_size(16), aligned(1), may_alias));

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE ints choose(ints mask, ints a, ints b) { return (a & mask) | (b & ~mask); }
INLINE vec pick(ints mask, vec a, vec b) { return (vec)choose(mask, (ints)a, (ints)b); }

/* Numbers of a row of a product that are held at once. */
typedef struct { vec a; } one;
typedef struct { vec a, b; } two;
typedef struct { vec a, b, c, d; } four;

INLINE one one_load(const float *p, long n) { (void)n; return (one){load(p)}; }
INLINE two two_load(const float *p, long n) { return (two){load(p), load(p + n)}; }
INLINE four four_load(const float *p, long n) { return (four){load(p), load(p + n), load(p + 2 * n), load(p + 3 * n)}; }
INLINE one one_sum(one s, one o) { return (one){s.a + o.a}; }
INLINE two two_sum(two s, two o) { return (two){s.a + o.a, s.b + o.b}; }
INLINE four four_sum(four s, four o) { return (four){s.a + o.a, s.b + o.b, s.c + o.c, s.d + o.d}; }
INLINE void one_store(float *p, long n, one s) { (void)n; store(p, s.a); }
INLINE void two_store(float *p, long n, two s) { store(p, s.a), store(p + n, s.b); }
INLINE void four_store(float *p, long n, four s)
{
    store(p, s.a), store(p + n, s.b), store(p + 2 * n, s.c), store(p + 3 * n, s.d);
}
INLINE one one_plus(one s, vec x, one o) { return (one){s.a + x * o.a}; }
INLINE two two_plus(two s, vec x, two o) { return (two){s.a + x * o.a, s.b + x * o.b}; }
INLINE four four_plus(four s, vec x, four o)
{
    return (four){s.a + x * o.a, s.b + x * o.b, s.c + x * o.c, s.d + x * o.d};
}

/* c = a b, or c += a b, of N rows. What is added is summed up by itself first: of many small terms, each by itself may
   be too small to change c. Each row of the result has a name of its own: compilers leave an array in memory.
   Rows of a are `row` numbers apart and its columns `step`, but after each `run` of them the next one is `block` from
   where the run began. Rows of b are `b_step` apart and its vectors `b_vec`; in the same way for c. */
#define ROWS_4(DO, T) DO(0, T) DO(1, T) DO(2, T) DO(3, T)
#define ROWS_8(DO, T) ROWS_4(DO, T) DO(4, T) DO(5, T) DO(6, T) DO(7, T)
#define BEGIN(r, T) T s##r = {0};
#define STEP(r, T) s##r = T##_plus(s##r, all(a[r * row]), other);
#define END(r, T) T##_store(c + r * c_row, c_vec, add ? T##_sum(T##_load(c + r * c_row, c_vec), s##r) : s##r);
#define PRODUCT(T, N)                                                                                                  \
    INLINE void product_##T##_##N(const float *a, long row, long step, long run, long block, long blocks,              \
                                  const float *b, long b_step, long b_vec, float *c, long c_row, long c_vec, int add)  \
    {                                                                                                                  \
        ROWS_##N(BEGIN, T)                                                                                             \
        for (long n = 0; n < blocks; n++, a += block - run * step)                                                     \
            for (long k = 0; k < run; k++, a += step, b += b_step) {                                                   \
                T other = T##_load(b, b_vec);                                                                          \
                ROWS_##N(STEP, T)                                                                                      \
            }                                                                                                          \
        ROWS_##N(END, T)                                                                                               \
    }
