/* Damaged images through the kernels: `LLVMFuzzerTestOneInput` for libFuzzer, or a program that damages files itself:
 *
 *   fuzz_kernels PART COUNT SEED FILE...
 *
 * PART is `scan` or `header`, of JPEGs, or `records`, of packed pixels. Input k of a seed is input 0 of seed + k. The
 * program prints how many inputs had each state. See tests/image/kernel_fuzz.py.
 *
 * The first bytes of an input choose the plan, and the rest is the payload. The payload, the scratch memory and the
 * result end at pages without access. */

#define _GNU_SOURCE

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels.h"

int64_t jpeg_run(struct image *images, int64_t count, const struct plan *plan, uint8_t *arena, int64_t arena_bytes);
int64_t raw_run(struct image *images, int64_t count, const struct plan *plan, uint8_t *arena, int64_t arena_bytes);
void use_plain(bool plain);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { CHOICES = 96, MOST_SIDE = 100, MOST_PIXELS = 1 << 21, MOST_ARENA = 1 << 27, PAGE = 4096 };

/* ---- memory between two pages without access ---- */

struct memory { uint8_t *end; int64_t bytes; };

static uint8_t *last(struct memory *memory, int64_t bytes)
{
    if (memory->end == NULL || memory->bytes < bytes) {
        int64_t room = (bytes / PAGE + 1) * PAGE;
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        uint8_t *begin = mmap(NULL, (size_t)room + 2 * PAGE, PROT_NONE, flags, -1, 0);
        if (begin == MAP_FAILED || mprotect(begin + PAGE, (size_t)room, PROT_READ | PROT_WRITE))
            abort();
        if (memory->end)
            munmap(memory->end - memory->bytes - PAGE, (size_t)memory->bytes + 2 * PAGE);
        *memory = (struct memory){begin + PAGE + room, room};
    }
    return memory->end - bytes;
}

/* ---- choices ---- */

struct choices { const uint8_t *at, *end; };

static int64_t choose(struct choices *choices, int64_t below)
{
    uint32_t number = 0;
    for (int place = 0; place < 4 && choices->at < choices->end; place++)
        number = number << 8 | *choices->at++;
    return number % below;
}

static struct plan plan_of(struct choices *choices)
{
    struct plan plan = {.kind = choose(choices, 3), .area_base = 0.02, .area_span = 0.98};
    bool is_wide = choose(choices, 2);
    plan.height = 1 + choose(choices, MOST_SIDE);
    plan.width = 1 + choose(choices, MOST_SIDE);
    plan.ratio_low = is_wide ? 0.25 : 0.75;
    plan.ratio_high = is_wide ? 4.0 : 1.25;
    plan.log_ratio_base = is_wide ? -1.3862943649291992 : -0.2876820862293243;
    plan.log_ratio_span = is_wide ? 2.7725887298583984 : 0.5108256340026855;
    plan.flip = choose(choices, 2) ? 0.5 : 0.0;
    plan.resize_height = 1 + choose(choices, 2 * MOST_SIDE);
    plan.resize_width = choose(choices, 2) ? -1 : 1 + choose(choices, 2 * MOST_SIDE);
    plan.scaled = choose(choices, 2);
    plan.most_pixels = choose(choices, 8) ? MOST_PIXELS : 1 + choose(choices, MOST_PIXELS);
    plan.floats = choose(choices, 2);
    for (int colour = 0; colour < 3; colour++) {
        plan.factors[colour] = 0.25;
        plan.shifts[colour] = colour;
    }
    int64_t layout = choose(choices, 8); /* 0: neither planes nor interleaved */
    plan.pixel_step = layout == 0 ? 4 : layout < 4 ? 3 : 1;
    plan.row_step = plan.pixel_step * plan.width;
    plan.colour_step = layout < 4 ? 1 : plan.height * plan.row_step;
    return plan;
}

static int64_t result_bytes(const struct plan *plan)
{
    int64_t last = (plan->height - 1) * plan->row_step + (plan->width - 1) * plan->pixel_step + 2 * plan->colour_step;
    return (last + 1) * (plan->floats ? 4 : 1);
}

/* Sets sides and length of raw pixels: most of them fit each other, and the others are any numbers. */
static void choose_sides(struct image *image, struct choices *choices)
{
    image->width = 1 + choose(choices, 200);
    image->height = image->length / 3 / image->width;
    int64_t wrong = choose(choices, 8), shift = choose(choices, 64);
    if (wrong != 0)
        image->length = 3 * image->height * image->width;
    if (wrong == 1)
        image->height = (int64_t)((uint64_t)choose(choices, 1 << 30) << shift);
    if (wrong == 2)
        image->width = choose(choices, 1 << 30) - (1 << 29);
    if (wrong == 3)
        image->height += 1 + choose(choices, 3);
}

/* ---- one input ---- */

static int64_t counts[TOO_LARGE + 1];

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct memory payload, scratch, result;
    static int file = -1;
    if (size < CHOICES)
        return 0;
    struct choices choices = {data, data + CHOICES};
    int64_t bytes = (int64_t)size - CHOICES;
    bool is_raw = choose(&choices, 2);
    use_plain(choose(&choices, 4) == 0);
    struct plan plan = plan_of(&choices);
    struct image image = {.file = -1, .length = bytes, .checksum = -1};
    image.key = (uint64_t)choose(&choices, INT64_C(1) << 32);
    uint8_t *source = last(&payload, bytes);
    memcpy(source, data + CHOICES, (size_t)bytes);
    image.source = (int64_t)(uintptr_t)source;
    if (is_raw)
        choose_sides(&image, &choices);
    int64_t check = choose(&choices, 8);
    if (check < 2)
        image.checksum = (int64_t)(checksum(source, image.length) ^ (uint32_t)check);
    if (choose(&choices, 8) == 0) {
        file = file < 0 ? memfd_create("payload", MFD_CLOEXEC) : file;
        if (ftruncate(file, 0) || pwrite(file, source, (size_t)bytes, 7) != bytes)
            abort();
        image.file = file;
        image.source = choose(&choices, 8) ? 7 : choose(&choices, 1 << 20) - 100;
        image.length += choose(&choices, 8) ? 0 : choose(&choices, 1 << 16);
    }
    int64_t room = choose(&choices, 4) ? 1 << 20 : 64 * choose(&choices, 4096);
    image.row = (int64_t)(uintptr_t)last(&result, result_bytes(&plan));
    /* In as many bytes as it says, everything must fit: first the file, then its box too. */
    for (int tries = 0; tries < 3; tries++) {
        struct image tried = image;
        uint8_t *arena = last(&scratch, room);
        int64_t needed = (is_raw ? raw_run : jpeg_run)(&tried, 1, &plan, arena, room);
        if (tried.state < DONE || tried.state > TOO_LARGE || (needed && (tried.state != TOO_LARGE || needed <= room)))
            abort();
        if (needed == 0 || needed > MOST_ARENA || tries == 2) {
            if (needed && needed <= MOST_ARENA)
                abort();
            counts[tried.state]++;
            break;
        }
        room = needed;
    }
    return 0;
}

#ifndef LIBFUZZER

/* ---- a program that damages files ---- */

static uint64_t seed, state;

/* SplitMix64. */
static int64_t random_below(int64_t below)
{
    uint64_t mixed = state += 0x9E3779B97F4A7C15;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
    return (int64_t)((mixed ^ (mixed >> 31)) >> 2) % below;
}

struct file { uint8_t *bytes; int64_t count, header; };

static struct file read_whole(const char *name)
{
    FILE *stream = fopen(name, "rb");
    struct file file = {malloc(1 << 20), 0, 2};
    if (!stream || !file.bytes)
        abort();
    file.count = (int64_t)fread(file.bytes, 1, 1 << 20, stream);
    fclose(stream);
    for (int64_t at = 2; at + 4 <= file.count && file.bytes[at] == 0xFF && file.header == 2;) {
        int64_t end = at + 2 + (file.bytes[at + 2] << 8 | file.bytes[at + 3]);
        file.header = file.bytes[at + 1] == 0xDA ? smaller(end, file.count) : 2;
        at = end;
    }
    return file;
}

/* Damages `count` bytes of a JPEG, from `first` to `end`, in one of several ways. Returns their new number. */
static int64_t damage(uint8_t *bytes, int64_t count, int64_t first, int64_t end)
{
    static const uint8_t values[] = {0, 1, 2, 0x11, 0x22, 0x7F, 0x80, 0xC0, 0xC4, 0xD0, 0xD9, 0xDA, 0xE1, 0xFE, 0xFF};
    int64_t at = first + random_below(end - first), length = smaller(1 + random_below(200), count - at);
    int64_t to = first + random_below(end - first);
    switch (random_below(9)) {
    case 0:
        bytes[at] ^= (uint8_t)(1 << random_below(8));
        return count;
    case 1:
        bytes[at] = (uint8_t)random_below(256);
        return count;
    case 2:
        bytes[at] = values[random_below(sizeof values)];
        return count;
    case 3:
        memset(bytes + at, 0, (size_t)length);
        return count;
    case 4: /* a hole */
        memmove(bytes + at, bytes + at + length, (size_t)(count - at - length));
        return count - length;
    case 5: /* a part, twice */
        memmove(bytes + to, bytes + at, (size_t)smaller(length, count - to));
        return count;
    case 6: /* a marker */
        memmove(bytes + at + 2, bytes + at, (size_t)(count - at));
        bytes[at] = 0xFF;
        bytes[at + 1] = (uint8_t)random_below(256);
        return count + 2;
    case 7: /* the end, too early */
        bytes[at] = 0xFF;
        bytes[at + 1] = 0xD9;
        return at + 2;
    default: /* cut off, and sometimes the whole file */
        return random_below(4) ? count : at;
    }
}

static void tell(void)
{
    printf("stopped at seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
}

void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

int main(int argc, char **arguments)
{
    static uint8_t input[CHOICES + (1 << 20) + 64];
    if (argc < 5)
        return 2;
    char part = *arguments[1];
    int64_t count = atoll(arguments[2]), first_seed = atoll(arguments[3]);
    struct file *files = calloc((size_t)argc, sizeof *files);
    for (int k = 4; k < argc; k++)
        files[k - 4] = read_whole(arguments[k]);
    if (__sanitizer_set_death_callback)
        __sanitizer_set_death_callback(tell);
    for (int64_t k = 0; k < count; k++) {
        state = seed = (uint64_t)(first_seed + k);
        const struct file *file = &files[random_below(argc - 4)];
        for (int place = 0; place < CHOICES; place++)
            input[place] = (uint8_t)random_below(256);
        memset(input, 0, 4); /* the first choice */
        input[3] = part == 'r';
        uint8_t *bytes = input + CHOICES;
        int64_t size = file->count;
        memcpy(bytes, file->bytes, (size_t)size);
        if (part == 'r')
            size = 1 + random_below(size);
        for (int64_t times = part == 'r' ? 0 : random_below(4); times > 0; times--) {
            int64_t border = smaller(file->header, size);
            if (part == 's' && size - border > 2)
                size = damage(bytes, size, border, size - 1);
            else if (part == 'h' && border > 3)
                size = damage(bytes, size, 2, border);
        }
        LLVMFuzzerTestOneInput(input, CHOICES + (size_t)size);
    }
    printf("done %lld undecided %lld unreadable %lld damaged %lld too_large %lld\n", (long long)counts[DONE],
           (long long)counts[UNDECIDED], (long long)counts[UNREADABLE], (long long)counts[DAMAGED],
           (long long)counts[TOO_LARGE]);
    return 0;
}

#endif
