// PRODUCTS: `omlxd_products` of one kind. FIELDS: of p, from the arguments TAKES.
extern "C" __global__ void __launch_bounds__(BOUNDS) FUNCTION(TAKES) {
  Products<T> p = {};
  FIELDS
  p.eps = __int_as_float(eps);
  PRODUCTS(p, BLOCK, nullptr, 0);
}
