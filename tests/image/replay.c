/* Runs the kernels on the cases in standard input, and writes what each image became, and its result.
 *
 *     replay [plain] <CASES >ANSWERS
 *
 * tests/image/test_kernels_on_arm.py writes the cases, and compares. A payload may be read out of CASES too, as file 0,
 * or be a JPEG.
 * Payloads, results and arenas end at a page without access. */

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels.h"

typedef int64_t entry(struct image *images, int64_t count, const struct plan *plan, uint8_t *arena, int64_t arena_bytes);
entry raw_run, jpeg_run;
void use_plain(bool plain);
const char *passes_name(void);

enum { UNTOUCHED = 77 }; /* as in `empty_row` of kernel_runs.py */

/* The payload follows. */
struct record {
    int64_t payload_bytes;
    int64_t result_bytes;
    int64_t encoded;    /* 1: a JPEG, 0: pixels */
    struct image image;
    struct plan plan;
};

struct memory { uint8_t *whole; size_t whole_bytes; uint8_t *bytes; };

static struct memory guarded(int64_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = ((size_t)bytes + page - 1) / page * page;
    uint8_t *whole = mmap(NULL, inner + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole == MAP_FAILED || mprotect(whole + inner, page, PROT_NONE))
        abort();
    return (struct memory){whole, inner + page, whole + inner - bytes};
}

static void release(struct memory memory) { munmap(memory.whole, memory.whole_bytes); }

static int64_t address(const void *place) { return (int64_t)(uintptr_t)place; }

/* Runs without an arena, to learn the bytes that it needs, and again with one of this size. A JPEG's header says what its
 * pixels need, so it may ask twice. */
static struct image run(const struct image *given, const struct plan *plan, entry *kernel)
{
    struct image image = *given;
    int64_t needed = kernel(&image, 1, plan, NULL, 0);
    for (int tries = 0; needed > 0; tries++) {
        if (tries == 2)
            abort();
        struct memory arena = guarded(needed);
        image = *given;
        needed = kernel(&image, 1, plan, arena.bytes, needed);
        release(arena);
    }
    return image;
}

static void replay(struct record *record)
{
    size_t payload_bytes = (size_t)record->payload_bytes, result_bytes = (size_t)record->result_bytes;
    struct memory payload = guarded(record->payload_bytes), result = guarded(record->result_bytes);
    if (fread(payload.bytes, 1, payload_bytes, stdin) != payload_bytes)
        abort();
    if (record->image.file < 0)
        record->image.source = address(payload.bytes);
    record->image.row = address(result.bytes);
    memset(result.bytes, UNTOUCHED, result_bytes);
    struct image image = run(&record->image, &record->plan, record->encoded ? jpeg_run : raw_run);
    fwrite(&image, sizeof image, 1, stdout);
    fwrite(result.bytes, 1, result_bytes, stdout);
    release(payload);
    release(result);
}

int main(int count, char **arguments)
{
    use_plain(count > 1 && strcmp(arguments[1], "plain") == 0);
    fputs(passes_name(), stderr);
    struct record record;
    while (fread(&record, sizeof record, 1, stdin) == 1)
        replay(&record);
    return 0;
}
