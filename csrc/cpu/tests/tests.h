// All tests. Every buffer in them has exactly the size it needs, so that sanitizers see what reaches past it.
#pragma once

namespace headrace {

void test_team();
void test_tiles();
void test_packed_pieces();
void test_layers();
void test_plan();
void test_bounds();
void test_checks();
void test_head();
void test_rows_of_logits();
void test_survivors();
void test_draws();
void test_step_inputs();

}  // namespace headrace
