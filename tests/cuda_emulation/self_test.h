// What kernel_check --self-test runs.
#pragma once

// Runs each case of misuse in a child, this program with --misuse; returns how many were not caught.
int self_test();
// The child's part.
int run_misuse(const char* name, bool lazy);
