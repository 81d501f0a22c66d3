/* Boxes of the three plans, from a sample's key: torch's generator and torchvision's draws, to the bit.
 *
 * Sources of the formulas: ATen/core/MT19937RNGEngine.h and TransformationHelper.h. `fastload.image.plans`
 * draws the same by torch.
 */

#include <math.h>

#include "kernels.h"

/* ---- words of the generator, 32 bits each ---- */

/* The first state has 624 words, each computed from the one before. Word k of the output needs words k, k + 1 and
 * k + DISTANCE of it. So the first 624 - DISTANCE = 227 need no second state, and no array. A box takes 42 at most. */
enum { DISTANCE = 397 };

struct words {
    uint32_t drawn; /* their number */
    uint32_t here, next, ahead;
};

static uint32_t state_word(uint32_t before, uint32_t place)
{
    return UINT32_C(1812433253) * (before ^ (before >> 30)) + place;
}

/* Seeds as `torch.Generator().manual_seed(key)`, which uses 32 bits of the key. */
static struct words seeded(uint64_t key)
{
    uint32_t here = (uint32_t)key, ahead = here;
    for (uint32_t place = 1; place <= DISTANCE; place++)
        ahead = state_word(ahead, place);
    return (struct words){0, here, state_word(here, 1), ahead};
}

static uint32_t next_word(struct words *words)
{
    uint32_t mixed = (words->here & 0x80000000) | (words->next & 0x7FFFFFFF);
    uint32_t word = words->ahead ^ (mixed >> 1) ^ (0x9908B0DF & (0 - (mixed & 1)));
    words->drawn++;
    words->here = words->next;
    words->next = state_word(words->next, words->drawn + 1);
    words->ahead = state_word(words->ahead, words->drawn + DISTANCE);
    word ^= word >> 11;
    word ^= (word << 7) & 0x9D2C5680;
    word ^= (word << 15) & 0xEFC60000;
    return word ^ (word >> 18);
}

static double uniform(struct words *words, double base, double span)
{
    double unit = (next_word(words) & 0xFFFFFF) * 0x1p-24;
    /* The product of two times 24 bits is exact in a double. */
    return (float)(unit * span + base);
}

static int64_t below(struct words *words, int64_t count) { return next_word(words) % count; }

/* ---- boxes ---- */

struct size size_before_crop(const struct image *image, const struct plan *plan)
{
    if (plan->kind != RESIZE_CENTER_CROP)
        return (struct size){plan->height, plan->width};
    if (plan->resize_width >= 0)
        return (struct size){plan->resize_height, plan->resize_width};
    int64_t shorter = smaller(image->height, image->width), longer = larger(image->height, image->width);
    int64_t resized = (int64_t)((double)(plan->resize_height * longer) / (double)shorter);
    return image->width <= image->height ? (struct size){resized, plan->resize_height}
                                         : (struct size){plan->resize_height, resized};
}

static bool is_within(int64_t height, int64_t width, int64_t most_pixels)
{
    return larger(height, width) <= LONGEST_SIDE && (most_pixels == 0 || height * width <= most_pixels);
}

static enum state check(const struct image *image, const struct plan *plan)
{
    if (image->height < 1 || image->width < 1)
        return DAMAGED;
    if (!is_within(image->height, image->width, plan->most_pixels) || plan->resize_height > LONGEST_SIDE)
        return TOO_LARGE;
    struct size resized = size_before_crop(image, plan);
    return is_within(resized.height, resized.width, plan->most_pixels) ? DONE : TOO_LARGE;
}

static void set_box(struct image *image, int64_t top, int64_t left, int64_t height, int64_t width)
{
    image->top = top;
    image->left = left;
    image->box_height = height;
    image->box_width = width;
}

/* Returns whether a side rounds to the same number with any exp within 2 ulp of torch's. Such an exp changes a side by at most
 * 1.2e-7 of itself. */
static bool is_decided(double side) { return fabs(side - rint(side)) < 0.5 - 1e-6 * side; }

/* Takes the largest box in the middle with an allowed ratio, as torchvision does after ten draws that do not fit. */
static void fall_back(struct image *image, const struct plan *plan)
{
    int64_t height = image->height, width = image->width;
    double ratio = (double)width / (double)height;
    if (ratio < plan->ratio_low)
        height = larger(1, (int64_t)rint((double)width / plan->ratio_low));
    else if (ratio > plan->ratio_high)
        width = larger(1, (int64_t)rint((double)height * plan->ratio_high));
    set_box(image, (image->height - height) / 2, (image->width - width) / 2, height, width);
}

/* Draws as torchvision's `RandomResizedCrop.get_params` does. Returns false if the last bit of exp decides. */
static bool draw_box(struct image *image, const struct plan *plan, struct words *words)
{
    double pixels = (double)(image->height * image->width);
    for (int attempt = 0; attempt < 10; attempt++) {
        double area = pixels * uniform(words, plan->area_base, plan->area_span);
        double ratio = exp(uniform(words, plan->log_ratio_base, plan->log_ratio_span));
        double exact_width = sqrt(area * ratio), exact_height = sqrt(area / ratio);
        if (!is_decided(exact_width) || !is_decided(exact_height))
            return false;
        /* They are compared as doubles, because a side may be larger than any int64. */
        double width = rint(exact_width), height = rint(exact_height);
        if (width > 0 && width <= (double)image->width && height > 0 && height <= (double)image->height) {
            int64_t rows = (int64_t)height, columns = (int64_t)width;
            int64_t top = below(words, image->height - rows + 1);
            set_box(image, top, below(words, image->width - columns + 1), rows, columns);
            return true;
        }
    }
    fall_back(image, plan);
    return true;
}

bool draw(struct image *image, const struct plan *plan)
{
    image->state = check(image, plan);
    if (image->state != DONE)
        return false;
    set_box(image, 0, 0, image->height, image->width);
    image->flip = 0;
    if (plan->kind == RANDOM_RESIZED_CROP) {
        struct words words = seeded(image->key);
        if (!draw_box(image, plan, &words))
            image->state = UNDECIDED;
        else if (plan->flip > 0)
            image->flip = uniform(&words, 0.0, 1.0) < plan->flip;
    }
    return image->state == DONE;
}
