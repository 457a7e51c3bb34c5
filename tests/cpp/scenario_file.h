// Scenario files (tests/scenarios/README.md says how they read) as lines, options and rows of tables.
#pragma once

#include <charconv>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/errors.h"

namespace scenarios {

using steploop::concat;
using steploop::Error;

inline std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

// Parts between separators, trimmed; between spaces, without the empty ones.
inline std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find(separator, start), text.size());
    const std::string_view part = trimmed(text.substr(start, end - start));
    if (separator != ' ' || !part.empty()) parts.emplace_back(part);
    start = end + 1;
  }
  return parts;
}

inline std::string joined(const std::vector<std::string>& parts, const char* separator) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : separator) + part;
  return text;
}

template <class Number>
Number number(const std::string& text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) throw Error("a number is wanted, got \"" + text + "\"");
  return value;
}

// The name=value parts of a line. Each must be asked for, or done() complains.
class Options {
 public:
  explicit Options(const std::vector<std::string>& parts, size_t first) {
    for (size_t i = first; i < parts.size(); ++i) {
      const size_t equals = parts[i].find('=');
      if (equals == std::string::npos) throw Error("name=value is wanted, got \"" + parts[i] + "\"");
      values_[parts[i].substr(0, equals)] = parts[i].substr(equals + 1);
    }
  }

  std::string text(const std::string& name, std::string otherwise = "") {
    const auto found = values_.find(name);
    if (found == values_.end()) return otherwise;
    otherwise = found->second;
    values_.erase(found);
    return otherwise;
  }
  template <class Number>
  void read(const std::string& name, Number& value) {
    if (const std::string given = text(name); !given.empty()) value = number<Number>(given);
  }
  void read(const std::string& name, bool& value) {
    const std::string given = text(name, value ? "on" : "off");
    if (given != "on" && given != "off") throw Error(name + " is on or off, got \"" + given + "\"");
    value = given == "on";
  }
  void done() const {
    if (!values_.empty()) throw Error("there is no option \"" + values_.begin()->first + "\"");
  }

 private:
  std::map<std::string, std::string> values_;
};

// "3 | cells", or "3-9 | cells" for several steps in which each scheduled sequence goes on where it was.
struct Row {
  int32_t first_step = 0, last_step = 0;
  std::vector<std::string> cells;

  static bool is_row(std::string_view line) { return !line.empty() && line[0] >= '0' && line[0] <= '9'; }

  explicit Row(std::string_view line) : cells(split(line, '|')) {
    const std::vector<std::string> steps = split(cells[0], '-');
    first_step = number<int32_t>(steps[0]);
    last_step = number<int32_t>(steps.back());
    cells.erase(cells.begin());
    for (std::string& cell : cells) cell = joined(split(cell, ' '), " ");
  }
};

// The cell "A:8+1* B:0+16" so many steps later: "A:9+1* B:16+16".
inline std::string advanced(const std::string& scheduled, int32_t num_steps) {
  std::vector<std::string> parts = split(scheduled, ' ');
  for (std::string& part : parts) {
    const size_t colon = part.find(':'), plus = part.find('+');
    if (colon == std::string::npos || plus == std::string::npos || plus < colon)
      throw Error("name:first+count is wanted, got \"" + part + "\"");
    const int32_t first = number<int32_t>(part.substr(colon + 1, plus - colon - 1));
    const size_t end = part.back() == '*' ? part.size() - 1 : part.size();
    const int32_t count = number<int32_t>(part.substr(plus + 1, end - plus - 1));
    part = concat(part.substr(0, colon + 1), first + count * num_steps, part.substr(plus));
  }
  return joined(parts, " ");
}

struct Line {
  int number = 0;
  std::string text;
};

struct Scenario {
  std::string file;
  std::string title;
  std::vector<Line> lines;  // all of them, the title's first
};

// Lines before the first title become a scenario without a title.
inline std::vector<Scenario> read_scenarios(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw Error("cannot read " + path);
  std::vector<Scenario> scenarios{{path, "", {}}};
  std::string text;
  for (int line = 1; std::getline(file, text); ++line) {
    if (text.starts_with("== ")) scenarios.push_back({path, std::string(trimmed(text.substr(3))), {}});
    scenarios.back().lines.push_back({line, text});
  }
  return scenarios;
}

}  // namespace scenarios
