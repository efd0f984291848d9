// Which kernel units this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "kernels/table.h"

namespace headrace {

// Units that were compiled in and that this CPU has, the best first; `generic` is always the last.
const std::vector<const Kernels*>& available_kernels();

// The unit of that name, or the best one for an empty name. Throws std::invalid_argument with the names there are.
const Kernels& find_kernels(const std::string& name);

}  // namespace headrace
