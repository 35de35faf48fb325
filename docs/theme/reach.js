// What is wider than the screen can be pushed sideways by keyboard too.
const reach = () =>
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((wide) => (wide.tabIndex = 0));
new MutationObserver(reach).observe(document.body, { childList: true, subtree: true });
reach();
