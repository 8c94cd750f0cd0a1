# Front of the build: a few named targets. `make help` lists them.
BUILD := build
.PHONY: build test
build:
	cmake -S . -B $(BUILD) -G Ninja -DCMAKE_BUILD_TYPE=Release -DDSPATTN_WERROR=ON
	cmake --build $(BUILD)
test: build
	ctest --test-dir $(BUILD) --output-on-failure
