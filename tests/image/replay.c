/* Runs the kernels on recorded cases, and compares what they make with what torch made.
 *
 *     replay CASES [plain]
 *
 * tests/image/test_kernels_on_arm.py writes the cases. Inputs, results and arenas end at a page without access. */

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels.h"

int64_t draw_run(struct image *images, int64_t count, const struct plan *plan);
int64_t resample_run(struct image *images, int64_t count, const struct plan *plan, uint8_t *arena, int64_t arena_bytes);
int64_t raw_run(struct image *images, int64_t count, const struct plan *plan, uint8_t *arena, int64_t arena_bytes);
uint32_t crc32(const uint8_t *bytes, int64_t count, uint32_t begin);
void use_plain(bool plain);
const char *passes_name(void);

enum entry { DRAW, RESAMPLE, RAW, CRC };
enum { UNTOUCHED = 77, LEVELS = 3 * 256 };

/* The levels follow, if the plan has some, then the input, then the memory of the result. */
struct record {
    int64_t entry;
    int64_t input_bytes;
    int64_t result_bytes;
    struct image image;    /* `source` and `row` count from the begin of the input and of the result */
    struct image expected; /* its state, and its box and flip */
    struct plan plan;
};

enum verdict { SAME, DIFFERENT, LEFT_TO_PYTHON, VERDICTS };

struct memory { uint8_t *whole; size_t whole_bytes; uint8_t *bytes; };

static void stop(const char *why)
{
    perror(why);
    exit(2);
}

static struct memory guarded(int64_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = ((size_t)bytes + page - 1) / page * page;
    uint8_t *whole = mmap(NULL, inner + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole == MAP_FAILED || mprotect(whole + inner, page, PROT_NONE))
        stop("memory");
    return (struct memory){whole, inner + page, whole + inner - bytes};
}

static void release(struct memory memory) { munmap(memory.whole, memory.whole_bytes); }

static int64_t address(const void *place) { return (int64_t)(uintptr_t)place; }

static void read_into(void *to, int64_t bytes, FILE *cases)
{
    if (bytes > 0 && fread(to, (size_t)bytes, 1, cases) != 1)
        stop("the file of cases ends too soon");
}

static struct memory read_guarded(int64_t bytes, FILE *cases)
{
    struct memory memory = guarded(bytes);
    read_into(memory.bytes, bytes, cases);
    return memory;
}

/* Returns an open file with the input. */
static FILE *file_of(struct memory input, int64_t bytes)
{
    FILE *file = tmpfile();
    if (!file || fwrite(input.bytes, (size_t)bytes, 1, file) != 1 || fflush(file))
        stop("a temporary file");
    return file;
}

static bool same_box(const struct image *left, const struct image *right)
{
    return left->top == right->top && left->left == right->left && left->box_height == right->box_height
           && left->box_width == right->box_width && left->flip == right->flip;
}

/* The kernels leave a few draws to Python. */
static enum verdict verdict_on(const struct image *image, const struct image *expected, bool same)
{
    if (image->state == UNDECIDED && expected->state == DONE)
        return LEFT_TO_PYTHON;
    return same && image->state == expected->state ? SAME : DIFFERENT;
}

static enum verdict replay_draw(const struct record *record)
{
    struct image image = record->image;
    int64_t done = draw_run(&image, 1, &record->plan);
    bool same = done == (image.state == DONE) && same_box(&image, &record->expected);
    return verdict_on(&image, &record->expected, same);
}

static enum verdict replay_checksum(const struct record *record, struct memory input)
{
    uint32_t found = crc32(input.bytes, record->input_bytes, (uint32_t)record->image.key);
    return found == record->expected.checksum ? SAME : DIFFERENT;
}

static int64_t run(const struct record *record, struct image *image, const uint8_t *result, struct memory arena, int64_t bytes)
{
    *image = record->image;
    image->row += address(result);
    return (record->entry == RAW ? raw_run : resample_run)(image, 1, &record->plan, arena.bytes, bytes);
}

/* Runs twice: without an arena, to learn the bytes that it needs, and with one of this size. */
static enum verdict replay_pixels(const struct record *record, struct memory expected)
{
    struct memory result = guarded(record->result_bytes), nothing = {0};
    memset(result.bytes, UNTOUCHED, (size_t)record->result_bytes);
    struct image image;
    int64_t needed = run(record, &image, result.bytes, nothing, 0);
    bool same = (image.state == TOO_LARGE) == (needed > 0);
    if (needed > 0) {
        struct memory arena = guarded(needed);
        same &= run(record, &image, result.bytes, arena, needed) == 0;
        release(arena);
    }
    if (image.state == DONE)
        same &= same_box(&image, &record->expected);
    if (image.state == DONE || record->expected.state != DONE)
        same &= memcmp(result.bytes, expected.bytes, (size_t)record->result_bytes) == 0;
    release(result);
    return verdict_on(&image, &record->expected, same);
}

static enum verdict replay(struct record *record, FILE *cases)
{
    float levels[LEVELS];
    if (record->plan.levels) {
        read_into(levels, sizeof levels, cases);
        record->plan.levels = address(levels);
    }
    struct memory input = read_guarded(record->input_bytes, cases), expected = read_guarded(record->result_bytes, cases);
    FILE *file = record->image.file < 0 ? NULL : file_of(input, record->input_bytes);
    if (file)
        record->image.file = fileno(file);
    else
        record->image.source += address(input.bytes);
    enum verdict verdict;
    if (record->entry == DRAW)
        verdict = replay_draw(record);
    else if (record->entry == CRC)
        verdict = replay_checksum(record, input);
    else
        verdict = replay_pixels(record, expected);
    if (file)
        fclose(file);
    release(input);
    release(expected);
    return verdict;
}

int main(int count, char **arguments)
{
    FILE *cases = count < 2 ? NULL : fopen(arguments[1], "rb");
    if (!cases)
        stop("replay CASES [plain]");
    use_plain(count > 2 && strcmp(arguments[2], "plain") == 0);
    struct record record;
    int verdicts[VERDICTS] = {0}, number = 0;
    for (; fread(&record, sizeof record, 1, cases) == 1; number++) {
        enum verdict verdict = replay(&record, cases);
        verdicts[verdict]++;
        if (verdict == DIFFERENT)
            printf("case %d, of entry %d, differs\n", number, (int)record.entry);
    }
    fclose(cases);
    printf("%s: %d same, %d left to Python, %d differ\n", passes_name(), verdicts[SAME],
           verdicts[LEFT_TO_PYTHON], verdicts[DIFFERENT]);
    return verdicts[DIFFERENT] > 0;
}
