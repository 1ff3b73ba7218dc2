/* Dropout by a hash of a key and an entry's place: see dropout.py, which says the same in PyTorch's operations. */

#include <stdint.h>

typedef uint64_t u64;

/* y = x times `scale`, or times 0 where the hash is less than `least`. Entries lie as [a, b, c]; their places are
   counted as if they lay as [a, c, b]. */
void isofed_dropout(const float *x, float *y, u64 key, u64 least, float scale, long a, long b, long c)
{
    const u64 weyl = 0x9E3779B97F4A7C15u, one = 0xFF51AFD7ED558CCDu, two = 0xC4CEB9FE1A85EC53u;
    for (long n = 0; n < a * b; n++, x += c, y += c) {
        u64 first = n / b * b * c + n % b + 1;
        for (long k = 0; k < c; k++) {
            u64 bits = (first + (u64)k * b) * weyl + key;
            bits = (bits ^ bits >> 33) * one;
            bits = (bits ^ bits >> 33) * two;
            y[k] = x[k] * (bits >> 40 >= least ? scale : 0.0f);
        }
    }
}
