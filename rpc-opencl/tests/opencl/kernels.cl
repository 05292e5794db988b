// Kernels of the tests.

kernel void vector_add(global const float* a, global const float* b, global float* sum, int count) {
    int at = get_global_id(0);
    if (at < count) sum[at] = a[at] + b[at];
}

struct pair { int a; char b; };

kernel void values(global uchar* out, int whole, float half_of, ulong large, uchar small, float4 vector, struct pair both) {
    global int* ints = (global int*)out;
    ints[0] = whole;
    ((global float*)out)[1] = half_of;
    *(global ulong*)(out + 8) = large;
    ((global float*)out)[4] = vector.w;
    ints[5] = both.a + both.b;
    out[24] = small;
}

// Sums by groups, each in its own memory.
kernel void group_sums(global const int* in, global int* out, local int* scratch) {
    int item = get_local_id(0);
    scratch[item] = in[get_global_id(0)];
    barrier(CLK_LOCAL_MEM_FENCE);
    if (item == 0) {
        int sum = 0;
        for (int at = 0; at < get_local_size(0); at++) sum += scratch[at];
        out[get_group_id(0)] = sum;
    }
}

kernel void fill(global int* out, int value) {
    out[get_global_id(0)] = value;
}

kernel void count_up(global volatile int* out, int times) {
    for (int time = 0; time < times; time++) out[get_global_id(0)] += 1;
}

// Never ends while the word is zero, which it stays.
kernel void endless(global volatile int* word) {
    while (word[0] == 0) { }
}
