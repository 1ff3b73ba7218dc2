/* One term of an exact sum: see exact.py, which says the same in PyTorch's operations. Compiled without fused
   multiplications and additions, which round once where this has to round twice. */

/* Add `factor` times a value. Without a coarse sum, all of it goes into the fine one. */
void isofed_add(const float *restrict value, double factor, double to_coarse, double to_fine, double *restrict coarse,
                double *restrict fine, long n)
{
    if (coarse)
        for (long i = 0; i < n; i++) {
            double term = value[i] * factor, whole = (term + to_coarse) - to_coarse, rest = term - whole;
            coarse[i] += whole;
            fine[i] += (rest + to_fine) - to_fine;
        }
    else
        for (long i = 0; i < n; i++) {
            double term = value[i] * factor;
            fine[i] += (term + to_fine) - to_fine;
        }
}
