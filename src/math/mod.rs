//! Pure functions that know no model: envelopes, radial bases, spherical basis, Wigner-D, quadrature, index layouts.
