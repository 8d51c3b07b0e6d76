// Modules, functions and launches. Kernels compute nothing: a launch is counted, shown to the profiler, and waits or
// fails as the settings say.
#include "core.h"

#include <elf.h>

#include <cstring>
#include <map>

namespace null_gpu {

struct Function {
  std::string name;
};

// A module keeps the size and the first contents of its variables.
struct Module {
  const int device = current_device();
  std::mutex mutex;
  std::map<std::string, std::string> contents;
  std::map<std::string, void *> placed;
};

// Reads the variables of an image, which is an ELF file (a cubin).
static Module *load(const void *image) {
  auto *module = new Module;
  auto *base = static_cast<const char *>(image);
  auto *header = static_cast<const Elf64_Ehdr *>(image);
  if (!image || memcmp(header->e_ident, ELFMAG, SELFMAG)) return module;
  auto *sections = reinterpret_cast<const Elf64_Shdr *>(base + header->e_shoff);
  for (const Elf64_Shdr *table = sections; table < sections + header->e_shnum; table++) {
    if (table->sh_type != SHT_SYMTAB) continue;
    const char *names = base + sections[table->sh_link].sh_offset;
    auto *symbols = reinterpret_cast<const Elf64_Sym *>(base + table->sh_offset);
    for (size_t k = 0; k < table->sh_size / sizeof *symbols; k++) {
      const Elf64_Sym &symbol = symbols[k];
      bool variable = ELF64_ST_TYPE(symbol.st_info) == STT_OBJECT && symbol.st_size;
      if (!variable || symbol.st_shndx >= header->e_shnum) continue;
      const Elf64_Shdr &section = sections[symbol.st_shndx];
      const char *first = base + section.sh_offset + symbol.st_value;
      std::string &contents = module->contents[names + symbol.st_name];
      contents.assign(symbol.st_size, 0);
      if (section.sh_type != SHT_NOBITS) contents.assign(first, symbol.st_size);
    }
  }
  return module;
}

static Observer observer = nullptr;
void observe(Observer function) { observer = function; }

void show(const char *kernel, const Copy *copy, CUstream stream) {
  stream = stream_or_default(stream);
  if (observer && !capturing(stream)) observer(kernel, copy, stream, device_of(stream));
}

void kernel() {
  count("kernels of device " + std::to_string(current_device()));
  run_kernel(current_device());
}

CUresult launch(const char *name, CUstream stream) {
  show(name, nullptr, stream);
  return enqueue(stream, kernel);
}

CUfunction function_named(const char *name) { return reinterpret_cast<CUfunction>(new Function{name}); }

static CUresult launch(CUfunction function, CUstream stream) {
  return launch(reinterpret_cast<Function *>(function)->name.c_str(), stream);
}

}  // namespace null_gpu

using namespace null_gpu;

extern "C" {

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = reinterpret_cast<CUmodule>(load(image));
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned, CUjit_option *, void **) {
  return cuModuleLoadData(module, image);
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image) {
  return cuModuleLoadData(module, image);
}

CUresult cuModuleUnload(CUmodule handle) {
  auto *module = reinterpret_cast<Module *>(handle);
  for (auto &[name, p] : module->placed) release(p);
  delete module;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *name) {
  *function = function_named(name);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetGlobal(CUdeviceptr *p, size_t *bytes, CUmodule handle, const char *name) {
  auto *module = reinterpret_cast<Module *>(handle);
  Lock lock(module->mutex);
  auto found = module->contents.find(name);
  if (found == module->contents.end()) return CUDA_ERROR_NOT_FOUND;
  const std::string &contents = found->second;
  void *&place = module->placed[name];
  if (!place) {
    if (!(place = allocate(contents.size(), module->device))) return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(place, contents.data(), contents.size());
  }
  if (p) *p = reinterpret_cast<CUdeviceptr>(place);
  if (bytes) *bytes = contents.size();
  return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *, CUjit_option *, void **, unsigned,
                           CUlibraryOption *, void **, unsigned) {
  *library = static_cast<CUlibrary>(opaque_handle());
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary, const char *name) {
  *kernel = reinterpret_cast<CUkernel>(function_named(name));
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetModule(CUmodule *module, CUlibrary) { return cuModuleLoadData(module, nullptr); }
CUresult cuLibraryGetGlobal(CUdeviceptr *, size_t *, CUlibrary, const char *) { return CUDA_ERROR_NOT_FOUND; }
CUresult cuFuncGetModule(CUmodule *module, CUfunction) { return cuModuleLoadData(module, nullptr); }

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char **name, CUfunction function) {
  *name = reinterpret_cast<Function *>(function)->name.c_str();
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute name, CUfunction) {
  *value = name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : name == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction, int, size_t) {
  *n = 2;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, CUfunction, int, size_t, unsigned) {
  *n = 2;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction, const CUlaunchConfig *) {
  *n = 66;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, CUstream stream, void **, void **) {
  return launch(function, stream);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **, void **) {
  return launch(function, config->hStream);
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   unsigned, unsigned, CUstream stream, void **) {
  return launch(function, stream);
}
}
