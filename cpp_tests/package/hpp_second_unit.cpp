// The C++ header in a second unit of one program: nothing in it may be defined twice.
#include <kvferry.hpp>

#include <kvferry.h>

std::string second_unit();
std::string second_unit() { return kvferry::last_error(); }
