// What the theme leaves out for readers without a mouse or a screen: tables that scroll take the keyboard, a corner of
// a table is no heading, and buttons that copy are no parts of the page to go to.
const mend = () => {
  for (const each of document.querySelectorAll(".md-typeset__scrollwrap, pre > code")) each.tabIndex = 0;
  for (const each of document.querySelectorAll("th:empty")) each.outerHTML = "<td></td>";
  for (const each of document.querySelectorAll(".md-code__nav")) each.role = "presentation";
};
mend();
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
