/* The update of a dense layer along a gradient that is not multiplied out. */

#include "native.h"

#define PART 512 /* numbers of a row at once, so that what is multiplied with them stays in the nearest cache */

PRODUCT(four, 4)

/* w += g' x. Weights are [outputs, width], of multiples of 4 and 64; g is [rows, outputs] and x [rows, width]. */
void isofed_add_product(const float *g, const float *x, float *w, long rows, long outputs, long width)
{
    for (long start = 0; start < width; start += PART) {
        long end = start + PART < width ? start + PART : width;
        for (long o = 0; o < outputs; o += 4) {
            for (long r = o + 4; r < o + 8 && r < outputs; r++) /* ask for what comes next ahead of time */
                for (long i = start; i < end; i += LANES) __builtin_prefetch(w + r * width + i, 1);
            for (long i = start; i < end; i += 4 * LANES)
                product_four_4(g + o, 1, outputs, rows, 0, 1, x + i, width, LANES, w + o * width + i, width, LANES, 1);
        }
    }
}
