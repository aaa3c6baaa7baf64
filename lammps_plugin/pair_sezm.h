// SPDX-License-Identifier: GPL-2.0-only
//
// pair_style sezm: hands LAMMPS' atoms and neighbour lists to libsezm and adds what comes back.
// There is no physics in these files; docs/lammps.md is the user's page.

#ifndef LMP_PAIR_SEZM_H
#define LMP_PAIR_SEZM_H

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pair.h"
#include "sezm.h"

namespace sezm_lammps {

struct FreeModel {
  void operator()(sezm_model *model) const { sezm_model_free(model); }
};
struct FreeEngine {
  void operator()(sezm_engine *engine) const { sezm_engine_free(engine); }
};

class PairSezm : public LAMMPS_NS::Pair {
  // LAMMPS "Update N" releases change class Pair without changing LAMMPS_VERSION. Where the host's Pair is
  // larger than the one in our headers, its constructor writes here and not over our members, so that
  // host_layout_matches() can be asked safely.
  char host_layout_slack_[1024];

 public:
  explicit PairSezm(LAMMPS_NS::LAMMPS *lmp);
  ~PairSezm() override;

  // Whether the fields that the host's Pair constructor has just set read back through our headers.
  // To be asked first: an object that says no must not be touched again, not even deleted.
  bool host_layout_matches() const;
  // Tells LAMMPS what this style can do.
  void declare_abilities();

  void settings(int narg, char **arg) override;
  void coeff(int narg, char **arg) override;
  void init_style() override;
  void init_list(int id, LAMMPS_NS::NeighList *neighbour_list) override;
  double init_one(int i, int j) override;
  void setup() override;
  void compute(int eflag, int vflag) override;
  double memory_usage() override;

  int pack_forward_comm(int n, int *atoms, double *buffer, int pbc_flag, int *pbc) override;
  void unpack_forward_comm(int n, int first, double *buffer) override;

 private:
  struct Options {
    std::string model_path, branch, device = "auto";
    sezm_precision precision = SEZM_FP32;
  };

  // The state of LAMMPS that the neighbour list in the engine was made from.
  struct ListKey {
    LAMMPS_NS::bigint builds, last_build;
    int n_local, n_all;
    bool operator==(const ListKey &other) const;
  };

  Options options_;
  std::unique_ptr<sezm_model, FreeModel> model_;
  sezm_model_info info_{};       // points into model_
  std::vector<int> model_type_;  // model type of each LAMMPS type (from 1), or -1
  std::unique_ptr<sezm_engine, FreeEngine> engine_;

  bool list_is_stale_ = true;
  ListKey list_key_{};
  std::vector<int> lammps_types_;     // of owned atoms and ghosts, when the list was handed over
  std::vector<std::int32_t> types_;   // their model types
  std::vector<std::uint32_t> nodes_;  // their owners' local indices

  Options parse_options(int narg, char **arg) const;
  void allocate_type_tables();
  std::vector<int> types_from_names(int narg, char **arg) const;
  std::vector<int> types_from_labels() const;
  int element_index(const std::string &name) const;
  std::string element_list() const;

  void refuse_unsupported_set_up() const;
  void create_engine();
  void print_banner() const;

  const double *positions() const;
  ListKey current_list_key() const;
  bool list_changed() const;
  void hand_over_list();
  void add_results(const sezm_results &results);

  void check(sezm_status status, const std::string &context) const;
  void say(const std::string &line) const;
  static void print_log_line(std::int32_t level, const char *message, void *context);
};

}  // namespace sezm_lammps

#endif
