{
  // The visible texts whose contrast with what is behind them is below 4.5 (WCAG 2.1, AA).
  lowContrast() {
    const parse = (text) => {
      const parts = text.match(/[\d.]+/g).map(Number);
      return parts.length < 4 ? [...parts, 1] : parts;
    };
    const linear = (value) => (value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const behind = (node) => {
      for (; node; node = node.parentElement) {
        const color = parse(getComputedStyle(node).backgroundColor);
        if (color[3] > 0.99) return color;
      }
      return [255, 255, 255];
    };
    const low = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const text = walker.currentNode.data.trim();
      const node = walker.currentNode.parentElement;
      if (!text || !node.checkVisibility() || node.closest(".off-screen, :disabled, option")) continue;
      const [light, dark] = [luminance(parse(getComputedStyle(node).color)), luminance(behind(node))].sort((a, b) => b - a);
      const ratio = (light + 0.05) / (dark + 0.05);
      if (ratio < 4.5) low.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
    }
    return low;
  },

  // Controls without a name that a screen reader would say.
  nameless() {
    const nodes = [...document.querySelectorAll("button, input, select, textarea, a, canvas, [role=tab]")];
    const isNamed = (node) => node.getAttribute("aria-label") || node.textContent.trim() || node.labels?.length;
    return nodes.filter((node) => node.checkVisibility() && !isNamed(node)).map((node) => node.outerHTML.slice(0, 90));
  },

  // Numbers all visible controls, and returns the numbers of those that the keyboard should reach.
  reachable() {
    const nodes = [...document.querySelectorAll("button, input, select, textarea, a[href], summary")];
    const isReachable = (node) => node.checkVisibility() && !node.disabled && node.tabIndex >= 0;
    return nodes.filter(isReachable).map((node, at) => (node.dataset.at = String(at)));
  },
}
