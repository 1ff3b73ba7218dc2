/* Records on their way into a file, many in one call: see state_file.py, which says the same in Python.

   A thread that writes beside the training has to get the interpreter back after each call, and the training waits for
   it each time. */

#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/uio.h>
#include <unistd.h>
#ifdef __PCLMUL__
#include <immintrin.h>
#endif

#define PIECES 1000 /* of one call to the system, which takes 1024 */

/* Bytes and where they go, and of which record's checksum they are a part, or -1. Without an address they are zeros. */
typedef struct {
    int64_t at, size, offset, record;
} Piece;

/* What goes into the file next, in one call. */
typedef struct {
    int file, count;
    int64_t offset, size;
    struct iovec pieces[PIECES];
} Run;

static uint32_t table[16][256];

/* The checksums of each byte with so many zeros behind it. */
__attribute__((constructor)) static void fill(void)
{
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t sum = n;
        for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? 0xedb88320u : 0);
        table[0][n] = sum;
    }
    for (int zeros = 1; zeros < 16; zeros++)
        for (int n = 0; n < 256; n++) table[zeros][n] = table[zeros - 1][n] >> 8 ^ table[0][table[zeros - 1][n] & 255];
}

/* The register of CRC-32 after more bytes, sixteen at a time. */
static uint32_t after(uint32_t sum, const unsigned char *at, int64_t size)
{
    for (; size >= 16; size -= 16, at += 16) {
        uint32_t next = 0;
        for (int n = 0; n < 16; n++) next ^= table[15 - n][n < 4 ? at[n] ^ (sum >> 8 * n & 255) : at[n]];
        sum = next;
    }
    for (; size; size--) sum = sum >> 8 ^ table[0][(sum ^ *at++) & 255];
    return sum;
}

#ifdef __PCLMUL__
#define FEWEST 64 /* bytes, of which there must be so many for this way */

static __m128i read_in(const unsigned char *at) { return _mm_loadu_si128((const __m128i *)at); }

/* Sixteen bytes moved ahead: each half is multiplied with what its distance leaves when divided by the polynomial. */
static __m128i ahead(__m128i x, __m128i by)
{
    return _mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11));
}

/* The same for a multiple of 64 bytes: 64 of them stand for all before, and in the end sixteen do. The factors are the
   rests of x^(512 + 32), x^(512 - 32), x^(128 + 32) and x^(128 - 32), with the highest power in the lowest bit and one
   place up (Gopal and others, Fast CRC computation for generic polynomials using PCLMULQDQ, Intel 2009). */
static uint32_t after_many(uint32_t sum, const unsigned char *at, int64_t size)
{
    const __m128i by_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_16 = _mm_set_epi64x(0xccaa009e, 0x1751997d0);
    __m128i here[4];
    unsigned char left[16];
    for (int n = 0; n < 4; n++) here[n] = read_in(at + 16 * n);
    here[0] = _mm_xor_si128(here[0], _mm_cvtsi32_si128((int)sum));
    while (size -= 64) {
        at += 64;
        for (int n = 0; n < 4; n++) here[n] = _mm_xor_si128(ahead(here[n], by_64), read_in(at + 16 * n));
    }
    for (int n = 1; n < 4; n++) here[n] = _mm_xor_si128(ahead(here[n - 1], by_16), here[n]);
    _mm_storeu_si128((__m128i *)left, here[3]);
    return after(0, left, 16);
}
#else
#define FEWEST INT64_MAX
#define after_many after
#endif

/* CRC-32 as zlib has it. */
static uint32_t checksum(uint32_t sum, const unsigned char *at, int64_t size)
{
    int64_t many = size < FEWEST ? 0 : size / 64 * 64;
    sum = ~sum;
    if (many) sum = after_many(sum, at, many);
    return ~after(sum, at + many, size - many);
}

/* Write what there is, and let the system begin to bring it to the disk, if it can be told to; 0, or the number of an
   error. */
static int write_out(Run *run)
{
    struct iovec *next = run->pieces;
    while (run->size) {
        ssize_t done = pwritev(run->file, next, run->pieces + run->count - next, run->offset);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return done ? errno : EIO;
#ifdef SYNC_FILE_RANGE_WRITE
        sync_file_range(run->file, run->offset, done, SYNC_FILE_RANGE_WRITE);
#endif
        run->offset += done, run->size -= done;
        for (; run->size && (size_t)done >= next->iov_len; next++) done -= next->iov_len;
        next->iov_base = (char *)next->iov_base + done, next->iov_len -= done;
    }
    run->count = 0;
    return 0;
}

/* Write pieces to their places, `most` bytes a call, and find the checksums of the records that they are of, in order.
   Before that the system may forget stretches that are past: where each begins, and its bytes. 0, or the number of an
   error. */
int isofed_put(int file, const Piece *pieces, int64_t count, int64_t most, int64_t *sums, const int64_t *past,
               int64_t stretches)
{
#ifdef POSIX_FADV_DONTNEED
    for (; stretches; stretches--, past += 2) posix_fadvise(file, past[0], past[1], POSIX_FADV_DONTNEED);
#endif
    static const unsigned char zeros[1 << 16]; /* as many as there are between two records, or less */
    Run run = {.file = file};
    int error = 0;
    for (const Piece *p = pieces; p < pieces + count; p++) {
        const unsigned char *at = p->at ? (const unsigned char *)p->at : zeros;
        if (p->offset != run.offset + run.size) {
            if ((error = write_out(&run))) return error;
            run.offset = p->offset;
        }
        for (int64_t left = p->size; left;) {
            int64_t some = left < most - run.size ? left : most - run.size;
            if (p->record >= 0) sums[p->record] = checksum(sums[p->record], at, some);
            run.pieces[run.count++] = (struct iovec){(void *)at, some};
            run.size += some, at += some, left -= some;
            if ((run.size == most || run.count == PIECES) && (error = write_out(&run))) return error;
        }
    }
    return write_out(&run);
}
