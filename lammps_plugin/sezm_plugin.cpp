// SPDX-License-Identifier: GPL-2.0-only
//
// The door through which LAMMPS finds pair_style sezm, and its locks: a plugin reads the host's C++ objects
// through the headers it was compiled with, so it must refuse a host that lays them out in another way.

#include <cstdio>
#include <string>

#include "atom.h"
#include "domain.h"
#include "error.h"
#include "force.h"
#include "lammps.h"
#include "library.h"
#include "pair_sezm.h"
#include "update.h"

#if !defined(SEZM_LAMMPS_VERSION_NUMBER) || !defined(SEZM_LAMMPS_VERSION_STRING)
#error "CMakeLists.txt defines the LAMMPS version that the headers belong to"
#endif

using namespace LAMMPS_NS;

namespace {

// lammpsplugin.h is in no package; its structure has been the same since plugins exist.
using PairFactory = Pair *(LAMMPS *);
struct PluginDescription {
  const char *version, *style, *name, *info, *author;
  PairFactory *create;
  void *handle;
};
using RegisterPlugin = void (*)(PluginDescription *, void *);

// The host's C functions know where its data lies; our headers must find it at the same addresses.
bool host_layout_matches(LAMMPS *lmp) {
  const auto lies_at = [lmp](const char *name, const void *ours) {
    return lammps_extract_global(lmp, name) == ours;
  };
  return lies_at("nlocal", &lmp->atom->nlocal) && lies_at("nghost", &lmp->atom->nghost) &&
         lies_at("ntimestep", &lmp->update->ntimestep) && lies_at("special_lj", lmp->force->special_lj) &&
         lies_at("boxlo", lmp->domain->boxlo);
}

const char *const REBUILD = ": build the plugin again with the headers of this very LAMMPS (docs/lammps.md)";

Pair *create_pair_sezm(LAMMPS *lmp) {
  auto *pair = new sezm_lammps::PairSezm(lmp);
  // A foreign layout makes even the destructor unsafe, so the object is left alone then.
  if (!pair->host_layout_matches())
    lmp->error->all(FLERR,
                    std::string("sezm plugin: class Pair of this LAMMPS differs from the headers that the "
                                "plugin was built with") +
                        REBUILD);
  pair->declare_abilities();
  return pair;
}

// Why this host cannot be served; empty if it can.
std::string reason_to_refuse(LAMMPS *lmp) {
  const int host_version = lammps_version(lmp);
  if (host_version != SEZM_LAMMPS_VERSION_NUMBER)
    return "it was built for LAMMPS " + std::to_string(SEZM_LAMMPS_VERSION_NUMBER) + " and this is LAMMPS " +
           std::to_string(host_version) + REBUILD;
  if (!host_layout_matches(lmp))
    return std::string("this LAMMPS lays out its data differently from the headers that it was built with") +
           REBUILD;
  if (sezm_abi_version() != SEZM_ABI_VERSION)
    return "its sezm.h and libsezm.a are of different versions: build it again from one source tree";
  return "";
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void lammpsplugin_init(void *lammps, void *handle,
                                                                         void *register_plugin) {
  // Not an error of LAMMPS: LAMMPS_PLUGIN_PATH loads all plugins of a folder into inputs that need none of
  // them.
  const std::string reason = reason_to_refuse(static_cast<LAMMPS *>(lammps));
  if (!reason.empty()) {
    if (lammps_extract_setting(lammps, "world_rank") == 0)
      std::fprintf(stderr, "WARNING: sezm plugin: pair_style sezm is not available: %s\n", reason.c_str());
    return;
  }
  static const std::string info = std::string("SeZM / DPA4 interatomic potential, sezm ") + sezm_version();
  PluginDescription plugin{};
  plugin.version = SEZM_LAMMPS_VERSION_STRING;
  plugin.style = "pair";
  plugin.name = "sezm";
  plugin.info = info.c_str();
  plugin.author = "the sezm developers";
  plugin.create = &create_pair_sezm;
  plugin.handle = handle;
  reinterpret_cast<RegisterPlugin>(register_plugin)(&plugin, lammps);
}
