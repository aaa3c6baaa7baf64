//! extern "C": handles, status codes, last error, callbacks. No physics (DESIGN section 7).
