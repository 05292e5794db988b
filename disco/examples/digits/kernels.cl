// The classifier's functions for OpenCL. Each sum has the order of that on the processor, so that the
// losses are the same but for the last bits of `exp` and `log`.

#pragma OPENCL FP_CONTRACT OFF

#define CLASSES 10
#define PIXELS 64
#define WEIGHTS ((PIXELS + 1) * CLASSES)

void probabilities(global const float* image, global const float* model, float* scores) {
    for (int class = 0; class < CLASSES; class++) scores[class] = model[PIXELS * CLASSES + class];
    for (int pixel = 0; pixel < PIXELS; pixel++)
        for (int class = 0; class < CLASSES; class++) scores[class] += image[pixel] * model[pixel * CLASSES + class];
    float largest = -INFINITY, sum = 0;
    for (int class = 0; class < CLASSES; class++) largest = fmax(largest, scores[class]);
    for (int class = 0; class < CLASSES; class++) sum += scores[class] = exp(scores[class] - largest);
    for (int class = 0; class < CLASSES; class++) scores[class] /= sum;
}

// One work-item for each image of the batch: its errors by class, and its loss.
kernel void errors(
    global const float* images, global const uchar* classes, global const float* model, global const int* batch,
    global float* errors, global float* losses
) {
    int item = get_global_id(0), image = batch[item], class = classes[image];
    float scores[CLASSES];
    probabilities(images + image * PIXELS, model, scores);
    losses[item] = log(fmax(scores[class], FLT_MIN));
    scores[class] -= 1;
    for (int class = 0; class < CLASSES; class++) errors[item * CLASSES + class] = scores[class];
}

// One work-item for each weight, and one for the loss behind them. The bias is the weight of a pixel
// that is always set.
kernel void gradient(
    global const float* images, global const int* batch, int count, global const float* errors,
    global const float* losses, global float* gradient
) {
    int at = get_global_id(0), pixel = at / CLASSES;
    float share = 1.0f / count, sum = 0;
    for (int item = 0; item < count; item++) {
        if (at == WEIGHTS) {
            sum -= share * losses[item];
        } else {
            float set = pixel == PIXELS ? 1 : images[batch[item] * PIXELS + pixel];
            sum += share * set * errors[item * CLASSES + at % CLASSES];
        }
    }
    gradient[at] = sum;
}

// One work-item for each weight, and one for the loss.
kernel void step_down(global float* model, global const float* gradient, global float* losses, float rate) {
    int at = get_global_id(0);
    if (at == WEIGHTS) losses[0] += gradient[at];
    else model[at] -= rate * gradient[at];
}

// One work-item for each image: the most probable class.
kernel void predict(global const float* images, global const float* model, global uchar* best) {
    int image = get_global_id(0), chosen = 0;
    float scores[CLASSES];
    probabilities(images + image * PIXELS, model, scores);
    for (int class = 0; class < CLASSES; class++)
        if (scores[class] >= scores[chosen]) chosen = class;
    best[image] = chosen;
}
