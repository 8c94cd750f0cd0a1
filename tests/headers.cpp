// Nothing: a target needs a source, and this one has headers alone (CMakeLists.txt).
